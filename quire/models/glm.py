"""GLM-4 (arXiv:2406.12793) and GLM-4-0414: Llama, of whose features neighbours rotate together, and not all of them.

The later one has norms around each block.
"""

from dataclasses import replace

from quire.config.model import ModelConfig
from quire.models.llama import LlamaShape, gated_mlp
from quire.models.weights import CheckpointFormat

FORMAT = CheckpointFormat(
    names=(
        (".post_attention_layernorm.", ".post_self_attn_layernorm."),
        (".pre_feedforward_layernorm.", ".post_attention_layernorm."),
        (".post_feedforward_layernorm.", ".post_mlp_layernorm."),
    ),
)


def glm_shape(config: ModelConfig) -> LlamaShape:
    """GlmForCausalLM."""
    bias = bool(config.hf_config.get("attention_bias", True))
    return LlamaShape(bias, interleaved=True, feed_forward=gated_mlp(config, fused=True))


def glm4_shape(config: ModelConfig) -> LlamaShape:
    """Glm4ForCausalLM."""
    return replace(glm_shape(config), norms="around", form=FORMAT)
