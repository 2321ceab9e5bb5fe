"""OPT (arXiv:2205.01068): learned positions, LayerNorm, ReLU.

The 350M model differs: it normalizes after each block instead of before, has no final norm, and its embeddings are
narrower than its layers.
"""

from dataclasses import replace
from functools import partial

from quire.config.model import ModelConfig
from quire.models.builder import Builder
from quire.models.llama import LlamaShape, plain_mlp
from quire.models.settings import count
from quire.models.weights import CheckpointFormat

FORMAT = CheckpointFormat(
    names=(
        ("model.norm.", "model.final_layer_norm."),
        (".input_layernorm.", ".self_attn_layer_norm."),
        (".post_attention_layernorm.", ".final_layer_norm."),
        (".self_attn.o_proj.", ".self_attn.out_proj."),
        (".mlp.", "."),
        ("model.", "model.decoder."),
    ),
    ignored=("decoder.version",),
)
POSITION_OFFSET = 2  # rows of the position table before that of position 0


def shape(config: ModelConfig) -> LlamaShape:
    """OPTForCausalLM."""
    hf, size = config.hf_config, config.hidden_size
    bias, is_before = bool(hf.get("enable_bias", True)), bool(hf.get("do_layer_norm_before", True))
    norm = partial(Builder.layer_norm, size=size, eps=1e-5, affine=bool(hf.get("layer_norm_elementwise_affine", True)))
    mlp = plain_mlp(config, "relu", bias, "activation_function")
    own = LlamaShape(bias, bias, feed_forward=mlp, positions=POSITION_OFFSET, norm=norm, form=FORMAT)
    final_norm = is_before and not hf.get("_remove_final_layer_norm", False)
    own = replace(own, norms="before" if is_before else "of sums", final_norm=final_norm)
    return replace(own, embedding_size=count(config, "word_embed_proj_dim", size))
