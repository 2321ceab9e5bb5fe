"""Qwen3-VL-MoE (arXiv:2511.21631), text only: Qwen3-MoE, of which checkpoints hold a layer's experts as one tensor."""

from dataclasses import replace

from quire.config.model import ModelConfig
from quire.models.builder import Builder
from quire.models.causal_lm import CausalLM
from quire.models.llama import build_llama
from quire.models.qwen_moe import qwen3_shape
from quire.models.stacked import cut_experts
from quire.models.weights import CheckpointFormat

FORMAT = CheckpointFormat(cut=cut_experts)


def build(config: ModelConfig, builder: Builder) -> CausalLM:
    """The language model of Qwen3VLMoeForConditionalGeneration."""
    return build_llama(config, builder, replace(qwen3_shape(config, renormalize=True), form=FORMAT))
