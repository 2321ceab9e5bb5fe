"""Llama (arXiv:2302.13971): RMSNorm, rotary positions, grouped query attention, gated MLP.

Mistral (arXiv:2310.06825), whose windows `ModelConfig` has resolved; Phi-3 (arXiv:2404.14219), whose checkpoints merge
matrices; Qwen2 (arXiv:2407.10671), with biases on queries, keys and values; and Qwen3 (arXiv:2505.09388), with a norm
on each head of queries and keys, are this with a few switches, and are built here. Their mixtures of experts build
themselves with `build_llama`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from quire.attention.base import AttentionSpec
from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.layers.rotary import RopeParameters, rope_table
from quire.models.builder import AttentionForm, Builder
from quire.models.causal_lm import CausalLM
from quire.models.decoder import Decoder, DecoderLayer
from quire.models.settings import number
from quire.models.weights import CheckpointFormat

FORMAT = CheckpointFormat(ignored=(".rotary_emb.inv_freq",))

FeedForward = Callable[[int, Builder], nn.Module]  # (layer, builder of what follows its attention) -> the module


@dataclass(frozen=True)
class LlamaShape(AttentionForm):
    """What Llama's kin differ in.

    Attributes:
        feed_forward: makes what follows attention; None for a gated MLP.
    """

    feed_forward: FeedForward | None = None
    form: CheckpointFormat = FORMAT


def build(config: ModelConfig, builder: Builder) -> CausalLM:
    """LlamaForCausalLM."""
    hf = config.hf_config
    bias, mlp_bias = bool(hf.get("attention_bias", False)), bool(hf.get("mlp_bias", False))
    return build_llama(config, builder, LlamaShape(bias, bias, feed_forward=_gated_mlp(config, mlp_bias)))


def build_qwen2(config: ModelConfig, builder: Builder) -> CausalLM:
    """Qwen2ForCausalLM."""
    return build_llama(config, builder, LlamaShape(qkv_bias=True))


def build_qwen3(config: ModelConfig, builder: Builder) -> CausalLM:
    """Qwen3ForCausalLM."""
    bias = bool(config.hf_config.get("attention_bias", False))
    return build_llama(config, builder, LlamaShape(bias, bias, head_norms=True))


def build_phi3(config: ModelConfig, builder: Builder) -> CausalLM:
    """Phi3ForCausalLM."""
    return build_llama(config, builder, LlamaShape(fused=True, feed_forward=_gated_mlp(config, fused=True)))


def build_llama(config: ModelConfig, builder: Builder, shape: LlamaShape = LlamaShape()) -> CausalLM:
    """A model of Llama's shape; without switches, MistralForCausalLM."""
    size, eps = config.hidden_size, number(config, "rms_norm_eps", 1e-6)
    spec = llama_attention(config, build_rope(config))
    feed_forward = shape.feed_forward or _gated_mlp(config)

    def layer(index: int, builder: Builder) -> DecoderLayer:
        own = replace(spec, window=config.layer_windows[index])
        attention = builder.child("self_attn").attention(size, own, shape)
        mlp = feed_forward(index, builder.child("mlp"))
        return DecoderLayer(builder.rms_norm(size, eps), attention, builder.rms_norm(size, eps), mlp)

    body = builder.child("model")
    embedding = body.embedding("embed_tokens", config.vocab_size, size)
    layers = body.layers(config.num_layers, layer)
    return CausalLM(config, builder, Decoder(embedding, layers, body.rms_norm(size, eps)), embedding, shape.form)


def _gated_mlp(config: ModelConfig, bias: bool = False, fused: bool = False) -> FeedForward:
    size, inner = config.hidden_size, config.intermediate_size
    activation = str(config.hf_config.get("hidden_act", "silu"))

    def feed_forward(index: int, builder: Builder) -> nn.Module:
        return builder.gated_mlp(size, inner, activation=activation, bias=bias, fused=fused)

    return feed_forward


def llama_attention(config: ModelConfig, rope: Tensor) -> AttentionSpec:
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
