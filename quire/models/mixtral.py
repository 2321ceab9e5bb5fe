"""Mixtral (arXiv:2401.04088): Mistral with a mixture of experts in place of each MLP."""

from quire.config.model import ModelConfig
from quire.models.llama import LlamaShape
from quire.models.mixtures import mixture
from quire.models.weights import CheckpointFormat

FORMAT = CheckpointFormat(
    names=((".mlp.", ".block_sparse_moe."), (".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2.")),
)


def shape(config: ModelConfig) -> LlamaShape:
    """MixtralForCausalLM."""
    return LlamaShape(feed_forward=mixture(config), form=FORMAT)
