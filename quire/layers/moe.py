"""Mixture of experts: a router sends each token to a few of many gated MLPs, and sums what they answer.

A token's choice and sum depend on that token alone: experts are summed in the order of their numbers. Router and
shared expert are layers as any other; the rest is one operation, `quire.ops.mixture`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from quire import ops
from quire.attention.step import Step
from quire.errors import ModelLoadError
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP


@dataclass(frozen=True)
class Routing:
    """How a token chooses its experts.

    Attributes:
        top_k: experts of each token.
        renormalize: whether the weights of those chosen are divided by their sum.

    Raises:
        ModelLoadError: top_k is not within 1 .. num_experts.
    """

    num_experts: int
    top_k: int
    renormalize: bool

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ModelLoadError(
                f"config.json gives each token {self.top_k} of {self.num_experts} experts (num_experts_per_tok); it "
                "must be at least one, and no more than there are."
            )


class MixtureOfExperts(nn.Module):
    """``sum of weight * expert(x)`` over the chosen experts, plus ``sigmoid(gate(x)) * shared_expert(x)`` if there.

    Args:
        gate: the router, H -> E.
        shared: an expert that is computed for every token, with the gate H -> 1 that weighs it.
        owners: which rank has which of the experts; None where all are here, or parts of all.

    Attributes:
        waits: the host asks the device how many rows each expert has.
    """

    def __init__(
        self,
        routing: Routing,
        gate: Linear,
        experts: list[GatedMLP],
        shared: tuple[GatedMLP, Linear] | None = None,
        owners: ops.Owners | None = None,
    ) -> None:
        super().__init__()
        self.routing, self.gate = routing, gate
        self.experts = nn.ModuleList(experts)
        self.shared_expert, self.shared_expert_gate = shared or (None, None)
        here = range(len(experts)) if owners is None else owners.own
        # An expert's rows are not the step's tokens: it sees no step.
        runs = {i: partial(experts[i], step=None) for i in here}
        self._all = ops.Experts(runs, routing.num_experts, owners, _weights(experts), experts[0].activation)
        self.waits = self._all.weights is None

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[T, H] -> [T, H]."""
        shared: list[Tensor] = []
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            shared = [self.shared_expert(x, step), self.shared_expert_gate(x, step)]
        return ops.mixture(x, self.gate(x, step), shared, self.routing.top_k, self.routing.renormalize, self._all)


def _weights(experts: Sequence[GatedMLP]) -> tuple[list[Mapping[str, Tensor]], list[Mapping[str, Tensor]]] | None:
    """Of all experts those of the first product, and of the second; None where these can't be multiplied together."""
    pairs = [(expert.gate_up_proj, expert.down_proj) for expert in experts]
    alike = len({(first.method, second.method) for first, second in pairs}) == 1
    if alike and not any(x.shard or not x.method.suits_experts for pair in pairs for x in pair):
        return [first.weights for first, _ in pairs], [second.weights for _, second in pairs]
    return None
