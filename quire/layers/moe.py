"""Mixture of experts: a router sends each token to a few of many gated MLPs, and sums what they answer.

A token's choice and sum depend on that token alone: experts are summed in the order of their numbers. Router and
shared expert are layers as any other; the rest is one operation, `quire.ops.mixture`.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor, nn

from quire import ops
from quire.attention.step import Step
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.ops.experts import Routing as Routing
from quire.quantization.base import CheckpointSlot, TensorForm


class MixtureOfExperts(nn.Module):
    """``sum of weight * expert(x)`` over the chosen experts, plus ``sigmoid(gate(x)) * shared_expert(x)`` if there.

    Args:
        routing: whose bias is a parameter that a checkpoint fills.
        gate: the router, H -> E.
        shared: an expert that is computed for every token, with the gate H -> 1 that weighs it, if any.
        owners: which rank has which of the experts; None where all are here, or parts of all.

    Attributes:
        waits: the host asks the device how many rows each expert has.
    """

    def __init__(
        self,
        routing: Routing,
        gate: Linear,
        experts: list[GatedMLP],
        shared: tuple[GatedMLP, Linear | None] | None = None,
        owners: ops.Owners | None = None,
    ) -> None:
        super().__init__()
        self.routing, self.gate = routing, gate
        self.experts = nn.ModuleList(experts)
        self.shared_expert, self.shared_expert_gate = shared or (None, None)
        self.e_score_correction_bias = routing.bias
        here = range(len(experts)) if owners is None else owners.own
        # An expert's rows are not the step's tokens: it sees no step.
        runs = {i: partial(experts[i], step=None) for i in here}
        self._all = ops.Experts(runs, routing.num_experts, owners, _weights(experts), experts[0].activation)
        self.waits = self._all.weights is None

    def checkpoint_slots(self, path: str) -> Iterator[CheckpointSlot]:
        """The place of the tensor that is its own; `path` is where the module stands."""
        if (bias := self.routing.bias) is not None:
            yield CheckpointSlot(f"{path}.e_score_correction_bias", TensorForm(tuple(bias.shape)), bias.copy_)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[T, H] -> [T, H]."""
        shared = [layer(x, step) for layer in (self.shared_expert, self.shared_expert_gate) if layer is not None]
        # Where a bias decides, scores are near each other: they are not rounded.
        scores = self.gate(x, step, wide=self.routing.bias is not None)
        return ops.mixture(x, scores, shared, self.routing, self._all)


def _weights(experts: Sequence[GatedMLP]) -> tuple[list[Mapping[str, Tensor]], list[Mapping[str, Tensor]]] | None:
    """Of all experts those of the first product, and of the second; None where these can't be multiplied together."""
    pairs = [(expert.gate_up_proj, expert.down_proj) for expert in experts]
    alike = len({(first.method, second.method) for first, second in pairs}) == 1
    if alike and not any(x.shard or not x.method.suits_experts for pair in pairs for x in pair):
        return [first.weights for first, _ in pairs], [second.weights for _, second in pairs]
    return None
