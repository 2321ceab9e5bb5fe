"""Qwen3 (arXiv:2505.09388): Llama with a norm on each head of queries and keys, and a head size of its own."""

from quire.config.model import ModelConfig
from quire.models.builder import Builder
from quire.models.causal_lm import CausalLM
from quire.models.llama import LlamaShape, build_llama


def build(config: ModelConfig, builder: Builder) -> CausalLM:
    """Qwen3ForCausalLM."""
    bias = bool(config.hf_config.get("attention_bias", False))
    return build_llama(config, builder, LlamaShape(bias, bias, head_norms=True))
