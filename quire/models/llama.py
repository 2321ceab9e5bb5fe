"""Llama (arXiv:2302.13971): RMSNorm, rotary positions, grouped query attention, gated MLP.

Mistral (arXiv:2310.06825), whose windows `ModelConfig` has resolved, and Ministral 3, whose queries have a table of
rotations of their own (`quire.layers.rotary`); Phi-3 (arXiv:2404.14219), whose checkpoints merge matrices; Qwen2
(arXiv:2407.10671), with biases on queries, keys and values; Qwen3 (arXiv:2505.09388), with a norm on each head of
queries and keys; Seed-OSS; SmolLM3, with layers that don't rotate; Granite, with factors on what is added; OLMo 2 and 3
(arXiv:2501.00656), with norms after each block and of whole queries and keys; EXAONE 4, of both sorts; and ERNIE 4.5
and Helium, of whose features neighbours rotate together, are this with a few switches, which are set here. Other
families set theirs in files of their own, and `build_llama` builds them all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from quire.attention.base import AttentionSpec
from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.layers.norm import Norm
from quire.layers.rotary import RopeParameters, rope_table
from quire.models.builder import AttentionForm, Builder
from quire.models.causal_lm import CausalLM
from quire.models.decoder import Decoder, DecoderLayer, NormOrder, decoder_layer
from quire.models.settings import count, number
from quire.models.weights import CheckpointFormat

FeedForward = Callable[[int, Builder], nn.Module]  # (layer, builder of what follows its attention) -> the module


@dataclass(frozen=True)
class LlamaShape(AttentionForm):
    """What Llama's kin differ in.

    Attributes:
        feed_forward: makes what follows attention; None for a gated MLP.
        positions: the row of position 0 in a table of learned ones; None where queries and keys are rotated instead.
        rotated: for each layer, whether it rotates queries and keys; () where all do.
        norm: makes a norm of a builder, where it is no RMSNorm.
        norms: where they stand.
        final_norm: whether one follows the last layer.
        norm_plus_one: norms of each head multiply by 1 + weight.
        embedding_size: features of token embeddings, where they are not those of the layers.
        embed_scale, score_scale, branch_scale, logit_scale: factors on embeddings, scores, on what a block adds to the
            residual stream, and on logits, where a family has its own.
        scales_by_depth: scores of layer i are divided by i + 1, too.
        score_cap, logit_cap: bounds of scores and logits, which are reached smoothly.
    """

    feed_forward: FeedForward | None = None
    positions: int | None = None
    rotated: tuple[bool, ...] = ()
    norm: Callable[[Builder], Norm] | None = None
    norms: NormOrder = "before"
    final_norm: bool = True
    norm_plus_one: bool = False
    embedding_size: int | None = None
    embed_scale: float | None = None
    score_scale: float | None = None
    branch_scale: float | None = None
    logit_scale: float | None = None
    scales_by_depth: bool = False
    score_cap: float | None = None
    logit_cap: float | None = None
    form: CheckpointFormat = CheckpointFormat()


def biases(config: ModelConfig, default: bool = False) -> LlamaShape:
    """That of a model whose config.json says whether its attention has biases."""
    bias = bool(config.hf_config.get("attention_bias", default))
    return LlamaShape(bias, bias)


def llama_shape(config: ModelConfig) -> LlamaShape:
    """LlamaForCausalLM: as `biases`, where config.json says so of the MLP, too."""
    feed_forward = gated_mlp(config, bool(config.hf_config.get("mlp_bias", False)))
    return replace(biases(config), feed_forward=feed_forward)


def mistral_shape(config: ModelConfig) -> LlamaShape:
    """MistralForCausalLM, and Ministral3ForCausalLM."""
    return LlamaShape()


def qwen2_shape(config: ModelConfig) -> LlamaShape:
    """Qwen2ForCausalLM."""
    return LlamaShape(qkv_bias=True)


def qwen3_shape(config: ModelConfig) -> LlamaShape:
    """Qwen3ForCausalLM."""
    return replace(biases(config), head_norms=True)


def seed_oss_shape(config: ModelConfig) -> LlamaShape:
    """SeedOssForCausalLM."""
    bias, output_bias = config.hf_config.get("attention_bias", True), config.hf_config.get("attention_out_bias", False)
    return replace(llama_shape(config), qkv_bias=bool(bias), output_bias=bool(output_bias))


def smollm3_shape(config: ModelConfig) -> LlamaShape:
    """SmolLM3ForCausalLM; its `no_rope_layers` has a 1 for each layer that rotates."""
    rotated, every = config.hf_config.get("no_rope_layers"), count(config, "no_rope_layer_interval", 4)
    if rotated is None:
        rotated = [(index + 1) % every != 0 for index in range(config.num_layers)]
    if not isinstance(rotated, list) or len(rotated) != config.num_layers:
        raise ModelLoadError(
            f"config.json of model {config.model!r} has no_rope_layers = {rotated!r}; it must be a list of "
            f"{config.num_layers} numbers, one for each layer."
        )
    return replace(llama_shape(config), rotated=tuple(map(bool, rotated)))


def granite_shape(config: ModelConfig) -> LlamaShape:
    """GraniteForCausalLM, with a factor of config.json's for all that has one."""
    return replace(
        llama_shape(config),
        embed_scale=number(config, "embedding_multiplier", 1.0),
        score_scale=number(config, "attention_multiplier", 1.0),
        branch_scale=number(config, "residual_multiplier", 1.0),
        logit_scale=1.0 / number(config, "logits_scaling", 1.0),
    )


def olmo_shape(config: ModelConfig) -> LlamaShape:
    """Olmo2ForCausalLM, and Olmo3ForCausalLM."""
    return replace(biases(config), whole_norms=True, norms="after")


def ernie_shape(config: ModelConfig) -> LlamaShape:
    """Ernie4_5ForCausalLM, and HeliumForCausalLM, which has no biases."""
    bias = bool(config.hf_config.get("use_bias", False))
    return LlamaShape(bias, bias, interleaved=True, feed_forward=gated_mlp(config, bias))


def exaone4_shape(config: ModelConfig) -> LlamaShape:
    """Exaone4ForCausalLM; where there are windows, layers without one don't rotate."""
    windows = config.layer_windows if config.hf_config.get("sliding_window", 0) is not None else ()
    rotated = tuple(window is not None for window in windows)
    return LlamaShape(head_norms=True, norms="after", rotated=rotated)


def phi3_shape(config: ModelConfig) -> LlamaShape:
    """Phi3ForCausalLM."""
    return LlamaShape(fused=True, feed_forward=gated_mlp(config, fused=True))


def build_llama(config: ModelConfig, builder: Builder, shape: LlamaShape) -> CausalLM:
    """A model of this shape, whichever family it is of."""
    size, eps = config.hidden_size, number(config, "rms_norm_eps", 1e-6)
    spec = llama_attention(config, build_rope(config) if shape.positions is None else None)
    scale, plus_one = shape.score_scale or spec.scale, shape.norm_plus_one
    spec = replace(spec, scale=scale, softcap=shape.score_cap, norm_plus_one=plus_one)
    window_rope = build_rope(config, config.window_rope_parameters) if config.window_rope_parameters else spec.rope
    feed_forward = shape.feed_forward or gated_mlp(config)
    norm = shape.norm or partial(Builder.rms_norm, size=size, eps=eps)

    def layer(index: int, builder: Builder) -> DecoderLayer:
        rotates = not shape.rotated or shape.rotated[index]
        window = config.layer_windows[index]
        rope = spec.rope if window is None else window_rope
        scale = spec.scale / (index + 1) if shape.scales_by_depth else spec.scale
        own = replace(spec, window=window, rope=rope if rotates else None, scale=scale)
        attention = builder.child("self_attn").attention(size, own, shape)
        mlp = feed_forward(index, builder.child("mlp"))
        return decoder_layer(shape.norms, partial(norm, builder), attention, mlp, shape.branch_scale)

    body, narrow = builder.child("model"), shape.embedding_size or size
    projections = positions = None
    if narrow != size:
        projections = body.first.linear("project_in", narrow, size), body.last.linear("project_out", size, narrow)
    embedding = body.embedding("embed_tokens", config.vocab_size, narrow)
    if shape.positions is not None:
        positions = body.first.positions("embed_positions", config.derived_max_model_len, size, shape.positions)
    layers = body.layers(config.num_layers, layer)
    final_norm = norm(body) if shape.final_norm else None
    decoder = Decoder(embedding, layers, final_norm, positions, shape.embed_scale, projections)
    scales = {"logit_scale": shape.logit_scale, "logit_softcap": shape.logit_cap}
    return CausalLM(config, builder, decoder, shape.form, **({} if config.num_labels else scales))


def gated_mlp(config: ModelConfig, bias: bool = False, fused: bool = False, activation: str = "") -> FeedForward:
    """A gated MLP in each layer; `fused`: its gate is merged with what it is multiplied with."""
    size, inner = config.hidden_size, config.intermediate_size
    activation = activation or str(config.hf_config.get("hidden_act", "silu"))
    return lambda index, builder: builder.gated_mlp(size, inner, activation=activation, bias=bias, fused=fused)


def plain_mlp(config: ModelConfig, activation: str, bias: bool, key: str = "hidden_act") -> FeedForward:
    """A plain MLP in each layer; `activation` where config.json names none under `key`."""
    size, inner = config.hidden_size, config.intermediate_size
    activation = str(config.hf_config.get(key, activation))
    return lambda index, builder: builder.mlp(size, inner, activation=activation, bias=bias)


def llama_attention(config: ModelConfig, rope: Tensor | None) -> AttentionSpec:
    """The attention that all layers of such a model have, windows aside."""
    dim, eps = config.head_dim, number(config, "rms_norm_eps", 1e-6)
    return AttentionSpec(config.num_heads, config.num_kv_heads, dim, dim**-0.5, norm_eps=eps, rope=rope)


def build_rope(config: ModelConfig, parameters: Mapping[str, Any] | None = None) -> Tensor:
    """The rotation that config.json describes, for every position that the engine allows.

    parameters: in place of ``config.rope_parameters``.
    """
    hf, values = config.hf_config, dict(config.rope_parameters if parameters is None else parameters)
    portion = values.get("partial_rotary_factor") or number(config, "partial_rotary_factor", 1.0)
    size = int(config.head_dim * portion)
    if size % 2 or not 2 <= size <= config.head_dim:
        raise ModelLoadError(
            f"config.json of model {config.model!r} has heads of {config.head_dim} features, of which {size} are "
            "rotated (partial_rotary_factor); it must be an even number of them, and no more than there are."
        )
    if hf.get("original_max_position_embeddings"):
        values["original_max_position_embeddings"] = hf["original_max_position_embeddings"]
    max_position = int(hf.get("max_position_embeddings") or config.derived_max_model_len)
    return rope_table(RopeParameters(size, values, max_position, config.max_model_len))
