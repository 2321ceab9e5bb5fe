"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm before each block, fused and transposed projections."""

from quire.attention.base import AttentionSpec
from quire.config.model import ModelConfig
from quire.models.builder import AttentionForm, Builder
from quire.models.causal_lm import CausalLM
from quire.models.decoder import Decoder, DecoderLayer
from quire.models.settings import number
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


def build(config: ModelConfig, builder: Builder) -> CausalLM:
    """GPT2LMHeadModel."""
    hf, size = config.hf_config, config.hidden_size
    eps = number(config, "layer_norm_epsilon", 1e-5)
    activation = str(hf.get("activation_function", "gelu_new"))

    def layer(index: int, builder: Builder) -> DecoderLayer:
        scale = config.head_dim**-0.5 if hf.get("scale_attn_weights", True) else 1.0
        if hf.get("scale_attn_by_inverse_layer_idx", False):
            scale /= index + 1
        spec = AttentionSpec(config.num_heads, config.num_heads, config.head_dim, scale)
        attention = builder.child("self_attn").attention(size, spec, AttentionForm(True, True, fused=True))
        mlp = builder.child("mlp").mlp(size, config.intermediate_size, activation=activation, bias=True)
        return DecoderLayer(builder.layer_norm(size, eps), attention, builder.layer_norm(size, eps), mlp)

    body = builder.child("model")
    embedding = body.embedding("embed_tokens", config.vocab_size, size)
    positions = body.first.positions("embed_positions", config.derived_max_model_len, size)
    decoder = Decoder(embedding, body.layers(config.num_layers, layer), body.layer_norm(size, eps), positions)
    return CausalLM(config, builder, decoder, embedding, FORMAT)
