"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm before each block, fused and transposed projections."""

from quire.attention.base import AttentionSpec
from quire.config.model import ModelConfig
from quire.layers.attention import SelfAttention
from quire.layers.embedding import LearnedPositions, VocabEmbedding
from quire.layers.linear import Linear
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm
from quire.models.causal_lm import BuildContext, CausalLM
from quire.models.decoder import Decoder, DecoderLayer
from quire.models.weights import CheckpointFormat

FORMAT = CheckpointFormat(
    prefix="transformer.",
    names=(
        ("model.embed_tokens.", "transformer.wte."),
        ("model.embed_positions.", "transformer.wpe."),
        ("model.norm.", "transformer.ln_f."),
        ("model.layers.", "transformer.h."),
        (".input_layernorm.", ".ln_1."),
        (".post_attention_layernorm.", ".ln_2."),
        (".self_attn.qkv_proj.", ".attn.c_attn."),
        (".self_attn.o_proj.", ".attn.c_proj."),
        (".mlp.fc1.", ".mlp.c_fc."),
        (".mlp.fc2.", ".mlp.c_proj."),
    ),
    ignored=(".attn.bias", ".attn.masked_bias"),  # causal masks
    transposed=(".c_attn.weight", ".c_proj.weight", ".c_fc.weight"),
)


def build(config: ModelConfig, context: BuildContext) -> CausalLM:
    """GPT2LMHeadModel."""
    hf, method, dtype = config.hf_config, context.method, context.dtype
    size, heads = config.hidden_size, config.num_heads
    eps = float(hf.get("layer_norm_epsilon", 1e-5))
    activation = str(hf.get("activation_function", "gelu_new"))

    def layer(index: int) -> DecoderLayer:
        scale = config.head_dim**-0.5 if hf.get("scale_attn_weights", True) else 1.0
        if hf.get("scale_attn_by_inverse_layer_idx", False):
            scale /= index + 1
        attention = SelfAttention(
            context.backend,
            AttentionSpec(heads, heads, config.head_dim, scale, layer=index),
            Linear(size, 3 * size, bias=True, method=method, dtype=dtype),
            Linear(size, size, bias=True, method=method, dtype=dtype),
        )
        mlp = MLP(size, config.intermediate_size, activation=activation, bias=True, method=method, dtype=dtype)
        return DecoderLayer(LayerNorm(size, eps, dtype), attention, LayerNorm(size, eps, dtype), mlp)

    embedding = VocabEmbedding(config.vocab_size, size, context.table_method, dtype)
    positions = LearnedPositions(config.derived_max_model_len, size, context.table_method, dtype)
    layers = [layer(i) for i in range(config.num_layers)]
    decoder = Decoder(embedding, layers, LayerNorm(size, eps, dtype), positions)
    return CausalLM(config, context, decoder, embedding, FORMAT)
