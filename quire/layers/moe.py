"""Mixture of experts: a router sends each token to a few of many gated MLPs, and sums what they answer.

A token's choice and sum depend on that token alone: experts are computed one by one on the rows that chose them, in the
order of their numbers. The router and the shared expert are layers as any other; the rest is torch between them, on the
host, whatever carries out the products.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire import ops
from quire.attention.step import Step
from quire.errors import ModelLoadError
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.ops.gather import Meeting


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

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [T, E] -> weights, float32 [T, k], and experts, int64 [T, k]; of equals the first is chosen."""
        wide = scores.float()
        wide = (wide - wide.amax(-1, keepdim=True)).exp_()
        shares, experts = torch.sort(wide / wide.sum(-1, keepdim=True), stable=True, dim=-1, descending=True)
        weights, experts = shares[:, : self.top_k], experts[:, : self.top_k]
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, experts


@dataclass(frozen=True)
class Owners:
    """Of a group whose ranks have whole experts each: where each rank's start, and their end."""

    group: Meeting
    starts: tuple[int, ...]

    @property
    def own(self) -> range:
        """The experts that are here."""
        return range(self.starts[self.group.rank], self.starts[self.group.rank + 1])


class MixtureOfExperts(nn.Module):
    """``sum of weight * expert(x)`` over the chosen experts, plus ``sigmoid(gate(x)) * shared_expert(x)`` if there.

    Args:
        gate: the router, H -> E.
        shared: an expert that is computed for every token, with the gate H -> 1 that weighs it.
        owners: which rank has which of the experts; None where all are here, or parts of all.
    """

    def __init__(
        self,
        routing: Routing,
        gate: Linear,
        experts: list[GatedMLP],
        shared: tuple[GatedMLP, Linear] | None = None,
        owners: Owners | None = None,
    ) -> None:
        super().__init__()
        self.routing = routing
        self.gate = gate
        self.experts = nn.ModuleList(experts)
        self.shared_expert, self.shared_expert_gate = shared or (None, None)
        self.owners = owners

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[T, H] -> [T, H]."""
        inputs = [x, self.gate(x, step)]
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            inputs += [self.shared_expert(x, step), self.shared_expert_gate(x, step)]
        # An expert's rows are not the step's tokens: it sees no step.
        here = range(len(self.experts)) if self.owners is None else self.owners.own
        runs = {i: ops.on_rows(lambda rows, e=self.experts[i]: e(rows, None), x) for i in here}
        return ops.host(_Mixture(self.routing, runs, self.owners), inputs, self.gate.shape.in_features)


@dataclass(frozen=True)
class _Mixture:
    """What is computed on the host.

    Attributes:
        runs: each expert that is here, as a function of its rows [n, H].
    """

    routing: Routing
    runs: dict[int, Callable[[Tensor], Tensor]]
    owners: Owners | None

    def __call__(
        self, x: Tensor, scores: Tensor, shared: Tensor | None = None, shared_score: Tensor | None = None
    ) -> Tensor:
        weights, experts = self.routing.choose(scores)
        weights, experts = weights.flatten(), experts.flatten()
        by_expert = experts.argsort(stable=True)
        total = torch.zeros(x.shape, dtype=torch.float32)
        counts = torch.bincount(experts, minlength=self.routing.num_experts).tolist()
        users = {i: chosen for i, chosen in enumerate(by_expert.split(counts)) if len(chosen)}
        rows = {i: chosen // self.routing.top_k for i, chosen in users.items()}
        answers = {i: self.runs[i](x.index_select(0, rows[i])) for i in users if i in self.runs}
        if self.owners is not None:  # summed in one rank's order all the same
            several = x.new_empty(len(experts), x.shape[1])
            for i, answer in answers.items():
                several[users[i]] = answer
            several = self.owners.group.gather_rows(several, experts, self.owners.starts)
            answers = {i: several[chosen] for i, chosen in users.items()}
        for i, chosen in users.items():
            total.index_add_(0, rows[i], answers[i].float().mul_(weights[chosen, None]))
        if shared is not None and shared_score is not None:
            total += shared.float() / torch.neg(shared_score.float()).exp_().add_(1.0)  # torch's sigmoid has two bodies
        return total.to(x.dtype)
