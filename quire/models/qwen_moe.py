"""Qwen2-MoE (arXiv:2407.10671) and Qwen3-MoE (arXiv:2505.09388): Qwen2 and Qwen3 with experts in some layers.

Qwen2-MoE also has an expert that every token shares, weighed by a gate of its own. Checkpoints hold experts one by one,
or a layer's as one tensor: those of Qwen3-VL-MoE (arXiv:2511.21631), and what transformers writes as it has them.
"""

from dataclasses import replace

from quire.config.model import ModelConfig
from quire.models.llama import FeedForward, LlamaShape, biases, gated_mlp, mixture
from quire.models.settings import count, indices
from quire.models.stacked import cut_experts
from quire.models.weights import CheckpointFormat

FORMAT = CheckpointFormat(cut=cut_experts)


def qwen2_shape(config: ModelConfig) -> LlamaShape:
    """Qwen2MoeForCausalLM."""
    shared_size = count(config, "shared_expert_intermediate_size", 5632, least=0)
    bias = bool(config.hf_config.get("qkv_bias", True))
    feed_forward = _feed_forward(config, shared_size=shared_size)
    return LlamaShape(bias, feed_forward=feed_forward, form=FORMAT)


def qwen3_shape(config: ModelConfig, renormalize: bool | None = None) -> LlamaShape:
    """Qwen3MoeForCausalLM. `renormalize`: of the experts' weights, where config.json does not say whether."""
    feed_forward = _feed_forward(config, renormalize)
    return replace(biases(config), head_norms=True, feed_forward=feed_forward, form=FORMAT)


def qwen3_vl_shape(config: ModelConfig) -> LlamaShape:
    """The language model of Qwen3VLMoeForConditionalGeneration."""
    return qwen3_shape(config, renormalize=True)


def _feed_forward(config: ModelConfig, renormalize: bool | None = None, shared_size: int = 0) -> FeedForward:
    """What follows attention in each layer: experts in every so manieth one, a plain MLP in those that are named."""
    dense = indices(config, "mlp_only_layers")
    if not count(config, "num_local_experts", count(config, "num_experts", 128, least=0), least=0):
        return gated_mlp(config)
    if renormalize is None:
        renormalize = bool(config.hf_config.get("norm_topk_prob", False))
    inner_size, every = count(config, "moe_intermediate_size", 768), count(config, "decoder_sparse_step", 1)

    def is_plain(index: int) -> bool:
        return index in dense or (index + 1) % every != 0

    return mixture(config, renormalize, inner_size, is_plain, shared_size=shared_size)
