"""GraniteMoE (Granite 3's 1B and 3B of A400M and A800M, and PowerMoE): Granite with a mixture in place of each MLP.

Checkpoints hold a layer's experts as one tensor, under names that are not those that transformers has in memory, and
writes where it is asked to: both are read.
"""

from collections.abc import Iterator
from dataclasses import replace

from quire.config.model import ModelConfig
from quire.models.llama import LlamaShape, granite_shape, mixture
from quire.models.stacked import cut_experts
from quire.models.weights import CheckpointFormat, Cut, TensorSpec

_BLOCK = ".block_sparse_moe."
_NAMES = {
    "input_linear.weight": "experts.gate_up_proj",
    "output_linear.weight": "experts.down_proj",
    "router.weight": "router.layer.weight",
}


def _cut(spec: TensorSpec, hidden_size: int) -> Iterator[Cut]:
    layer, block, name = spec.name.partition(_BLOCK)
    return cut_experts(replace(spec, name=layer + block + _NAMES.get(name, name)), hidden_size)


FORMAT = CheckpointFormat(names=((".mlp.", _BLOCK), (".gate.", ".router.layer.")), cut=_cut)


def shape(config: ModelConfig) -> LlamaShape:
    """GraniteMoeForCausalLM."""
    return replace(granite_shape(config), feed_forward=mixture(config), form=FORMAT)
