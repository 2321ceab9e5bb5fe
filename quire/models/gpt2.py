"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm before each block, fused and transposed projections."""

from dataclasses import replace
from functools import partial

from quire.config.model import ModelConfig
from quire.models.builder import Builder
from quire.models.llama import LlamaShape, plain_mlp
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


def shape(config: ModelConfig) -> LlamaShape:
    """GPT2LMHeadModel."""
    hf = config.hf_config
    norm = partial(Builder.layer_norm, size=config.hidden_size, eps=number(config, "layer_norm_epsilon", 1e-5))
    mlp = plain_mlp(config, "gelu_new", True, "activation_function")
    own = LlamaShape(True, True, fused=True, feed_forward=mlp, positions=0, norm=norm, form=FORMAT)
    scale, by_depth = hf.get("scale_attn_weights", True), hf.get("scale_attn_by_inverse_layer_idx", False)
    return replace(own, score_scale=None if scale else 1.0, scales_by_depth=bool(by_depth))
