"""Llama (arXiv:2302.13971): RMSNorm, rotary positions, grouped query attention, gated MLP.

Mistral, Qwen2 and Qwen3 are this with a few switches, and build themselves here.
"""

from dataclasses import replace

from torch import Tensor

from quire.attention.base import AttentionSpec
from quire.config.model import ModelConfig
from quire.layers.rotary import RopeParameters, rope_table
from quire.models.builder import Builder
from quire.models.causal_lm import CausalLM
from quire.models.decoder import Decoder, DecoderLayer
from quire.models.weights import CheckpointFormat

FORMAT = CheckpointFormat(ignored=(".rotary_emb.inv_freq",))


def build(config: ModelConfig, builder: Builder) -> CausalLM:
    """LlamaForCausalLM."""
    hf = config.hf_config
    bias = bool(hf.get("attention_bias", False))
    return build_llama(config, builder, qkv_bias=bias, output_bias=bias, mlp_bias=bool(hf.get("mlp_bias", False)))


def build_llama(
    config: ModelConfig,
    builder: Builder,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    head_norms: bool = False,
) -> CausalLM:
    """A model of Llama's shape.

    Args:
        qkv_bias, output_bias, mlp_bias: which linear layers have a bias.
        head_norms: RMSNorm over each head of queries and keys, before the rotation.
    """
    size, inner_size = config.hidden_size, config.intermediate_size
    eps = float(config.hf_config.get("rms_norm_eps", 1e-6))
    activation = str(config.hf_config.get("hidden_act", "silu"))
    spec = llama_attention(config, build_rope(config))

    def layer(index: int, builder: Builder) -> DecoderLayer:
        attention = builder.child("self_attn").attention(
            size,
            replace(spec, window=config.layer_windows[index]),
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            head_norms=head_norms,
        )
        mlp = builder.child("mlp").gated_mlp(size, inner_size, activation=activation, bias=mlp_bias)
        return DecoderLayer(builder.rms_norm(size, eps), attention, builder.rms_norm(size, eps), mlp)

    body = builder.child("model")
    embedding = body.embedding("embed_tokens", config.vocab_size, size)
    layers = [layer(i, child) for i, child in body.layers(config.num_layers)]
    return CausalLM(config, builder, Decoder(embedding, layers, body.rms_norm(size, eps)), embedding, FORMAT)


def llama_attention(config: ModelConfig, rope: Tensor) -> AttentionSpec:
    """The attention that all layers of such a model have, windows aside."""
    return AttentionSpec(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.head_dim**-0.5,
        norm_eps=float(config.hf_config.get("rms_norm_eps", 1e-6)),
        rope=rope,
    )


def build_rope(config: ModelConfig) -> Tensor:
    """The rotation that config.json describes, for every position that the engine allows."""
    hf, values = config.hf_config, dict(config.rope_parameters)
    portion = values.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    if hf.get("original_max_position_embeddings"):
        values["original_max_position_embeddings"] = hf["original_max_position_embeddings"]
    max_position = int(hf.get("max_position_embeddings") or config.derived_max_model_len)
    return rope_table(RopeParameters(int(config.head_dim * portion), values, max_position, config.max_model_len))
