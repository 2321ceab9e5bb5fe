"""Qwen2 (arXiv:2407.10671): Llama with biases on queries, keys and values; late layers may have a sliding window."""

from quire.config.model import ModelConfig
from quire.models.causal_lm import BuildContext, CausalLM
from quire.models.llama import build_llama


def build(config: ModelConfig, context: BuildContext) -> CausalLM:
    """Qwen2ForCausalLM."""
    return build_llama(config, context, qkv_bias=True)
