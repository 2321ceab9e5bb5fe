"""Qwen2 (arXiv:2407.10671): Llama with biases on queries, keys and values; late layers may have a sliding window."""

from quire.config.model import ModelConfig
from quire.models.builder import Builder
from quire.models.causal_lm import CausalLM
from quire.models.llama import LlamaShape, build_llama


def build(config: ModelConfig, builder: Builder) -> CausalLM:
    """Qwen2ForCausalLM."""
    return build_llama(config, builder, LlamaShape(qkv_bias=True))
