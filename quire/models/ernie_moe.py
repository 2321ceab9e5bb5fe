"""ERNIE 4.5's mixtures (21B-A3B): ERNIE 4.5 with experts in some layers, chosen with a bias, and one that all share."""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from quire.config.model import ModelConfig
from quire.layers.moe import Routing
from quire.models.llama import LlamaShape, ernie_shape, mixture
from quire.models.settings import count
from quire.models.stacked import cut_experts
from quire.models.weights import CheckpointFormat, Cut, TensorSpec


def _cut(spec: TensorSpec, hidden_size: int) -> Iterator[Cut]:
    if spec.name.endswith("e_score_correction_bias"):  # [1, experts]
        yield replace(spec, shape=spec.shape[-1:]), Tensor.flatten
    else:
        yield from cut_experts(spec, hidden_size)


FORMAT = CheckpointFormat(
    names=((".shared_expert.", ".shared_experts."), (".mlp.e_score_", ".mlp.moe_statics.e_score_")),
    left_out=("mtp_",),
    cut=_cut,
)


def shape(config: ModelConfig) -> LlamaShape:
    """Ernie4_5_MoeForCausalLM."""
    routing = Routing(count(config, "moe_num_experts", 64), count(config, "moe_k", 6), renormalize=True)
    inner_size, every = count(config, "moe_intermediate_size", 1536), count(config, "moe_layer_interval", 1)
    shared_size = inner_size * count(config, "moe_num_shared_experts", 2, least=0)
    first = count(config, "moe_layer_start_index", 1, least=0)
    last = count(config, "moe_layer_end_index", -1, least=-1) % config.num_layers

    def is_plain(index: int) -> bool:
        return not first <= index <= last or (index + 1) % every != 0

    others = {"choosing_bias": True, "shared_size": shared_size, "shared_gate": False}
    experts = mixture(config, routing, inner_size, is_plain, **others)
    return replace(ernie_shape(config), feed_forward=experts, form=FORMAT)
