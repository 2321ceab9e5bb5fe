"""Mistral (arXiv:2310.06825): Llama with a sliding window in some or all layers, which ModelConfig has resolved."""

from quire.config.model import ModelConfig
from quire.models.builder import Builder
from quire.models.causal_lm import CausalLM
from quire.models.llama import LlamaShape, build_llama


def build(config: ModelConfig, builder: Builder) -> CausalLM:
    """MistralForCausalLM."""
    return build_llama(config, builder, LlamaShape())
