"""OLMoE (arXiv:2409.02060): Llama with experts throughout, and OLMo 2's norms of whole queries and keys."""

from dataclasses import replace

from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.models.llama import LlamaShape, biases, mixture
from quire.models.stacked import cut_experts
from quire.models.weights import CheckpointFormat

FORMAT = CheckpointFormat(cut=cut_experts)


def shape(config: ModelConfig) -> LlamaShape:
    """OlmoeForCausalLM."""
    if config.hf_config.get("clip_qkv") is not None:
        raise ModelLoadError(f"model {config.model!r} clips queries, keys and values (clip_qkv): not supported yet.")
    experts = mixture(config, bool(config.hf_config.get("norm_topk_prob", False)))
    return replace(biases(config), whole_norms=True, feed_forward=experts, form=FORMAT)
