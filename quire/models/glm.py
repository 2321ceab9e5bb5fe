"""GLM-4 (arXiv:2406.12793) and GLM-4-0414: Llama, of whose features neighbours rotate together, and not all of them.

The later one has norms around each block.
"""

from dataclasses import replace

from quire.config.model import ModelConfig
from quire.models.builder import Builder
from quire.models.causal_lm import CausalLM
from quire.models.llama import LlamaShape, build_llama, gated_mlp
from quire.models.weights import CheckpointFormat

FORMAT = CheckpointFormat(
    names=(
        (".post_attention_layernorm.", ".post_self_attn_layernorm."),
        (".pre_feedforward_layernorm.", ".post_attention_layernorm."),
        (".post_feedforward_layernorm.", ".post_mlp_layernorm."),
    ),
)


def build_glm(config: ModelConfig, builder: Builder) -> CausalLM:
    """GlmForCausalLM."""
    return build_llama(config, builder, _shape(config))


def build_glm4(config: ModelConfig, builder: Builder) -> CausalLM:
    """Glm4ForCausalLM."""
    return build_llama(config, builder, replace(_shape(config), norms="around", form=FORMAT))


def _shape(config: ModelConfig) -> LlamaShape:
    bias = bool(config.hf_config.get("attention_bias", True))
    return LlamaShape(bias, interleaved=True, feed_forward=gated_mlp(config, fused=True))
