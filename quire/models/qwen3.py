"""Qwen3 (arXiv:2505.09388): Llama with a norm on each head of queries and keys, and a head size of its own."""

from quire.config.model import ModelConfig
from quire.models.causal_lm import BuildContext, CausalLM
from quire.models.llama import build_llama


def build(config: ModelConfig, context: BuildContext) -> CausalLM:
    """Qwen3ForCausalLM."""
    bias = bool(config.hf_config.get("attention_bias", False))
    return build_llama(config, context, qkv_bias=bias, output_bias=bias, head_norms=True)
