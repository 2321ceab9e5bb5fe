"""Llama (arXiv:2302.13971): RMSNorm, rotary positions, grouped query attention, gated MLP.

Mistral, Qwen2 and Qwen3 are this with a few switches, and build themselves here.
"""

from torch import Tensor

from quire.attention.base import AttentionSpec
from quire.config.model import ModelConfig
from quire.layers.attention import SelfAttention
from quire.layers.embedding import VocabEmbedding
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RopeParameters, rope_table
from quire.models.causal_lm import BuildContext, CausalLM
from quire.models.decoder import Decoder, DecoderLayer
from quire.models.weights import CheckpointFormat

FORMAT = CheckpointFormat(ignored=(".rotary_emb.inv_freq",))


def build(config: ModelConfig, context: BuildContext) -> CausalLM:
    """LlamaForCausalLM."""
    hf = config.hf_config
    bias = bool(hf.get("attention_bias", False))
    return build_llama(config, context, qkv_bias=bias, output_bias=bias, mlp_bias=bool(hf.get("mlp_bias", False)))


def build_llama(
    config: ModelConfig,
    context: BuildContext,
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
    hf, method, dtype = config.hf_config, context.method, context.dtype
    size, head_dim = config.hidden_size, config.head_dim
    eps = float(hf.get("rms_norm_eps", 1e-6))
    query_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
    rope = build_rope(config)

    def layer(index: int) -> DecoderLayer:
        q_norm = RMSNorm(head_dim, eps, dtype) if head_norms else None
        k_norm = RMSNorm(head_dim, eps, dtype) if head_norms else None
        spec = AttentionSpec(
            config.num_heads,
            config.num_kv_heads,
            head_dim,
            head_dim**-0.5,
            window=config.layer_windows[index],
            q_norm=None if q_norm is None else q_norm.weight,
            k_norm=None if k_norm is None else k_norm.weight,
            norm_eps=eps,
            rope=rope,
            layer=index,
        )
        qkv_proj = Linear(size, parts, bias=qkv_bias, method=method, dtype=dtype)
        o_proj = Linear(query_size, size, bias=output_bias, method=method, dtype=dtype)
        attention = SelfAttention(context.backend, spec, qkv_proj, o_proj, q_norm, k_norm)
        activation = str(hf.get("hidden_act", "silu"))
        mlp = GatedMLP(size, config.intermediate_size, activation=activation, bias=mlp_bias, method=method, dtype=dtype)
        return DecoderLayer(RMSNorm(size, eps, dtype), attention, RMSNorm(size, eps, dtype), mlp)

    embedding = VocabEmbedding(config.vocab_size, size, context.table_method, dtype)
    decoder = Decoder(embedding, [layer(i) for i in range(config.num_layers)], RMSNorm(size, eps, dtype))
    return CausalLM(config, context, decoder, embedding, FORMAT)


def build_rope(config: ModelConfig) -> Tensor:
    """The rotation that config.json describes, for every position that the engine allows."""
    hf, values = config.hf_config, dict(config.rope_parameters)
    portion = values.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    if hf.get("original_max_position_embeddings"):
        values["original_max_position_embeddings"] = hf["original_max_position_embeddings"]
    max_position = int(hf.get("max_position_embeddings") or config.derived_max_model_len)
    return rope_table(RopeParameters(int(config.head_dim * portion), values, max_position, config.max_model_len))
