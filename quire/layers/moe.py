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
from quire.errors import ModelLoadError
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.step import Step


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


class MixtureOfExperts(nn.Module):
    """``sum of weight * expert(x)`` over the chosen experts, plus ``sigmoid(gate(x)) * shared_expert(x)`` if there.

    Args:
        gate: the router, H -> E.
        shared_expert: computed for every token, with the gate H -> 1 that weighs it.
    """

    def __init__(
        self,
        routing: Routing,
        gate: Linear,
        experts: list[GatedMLP],
        shared_expert: GatedMLP | None = None,
        shared_expert_gate: Linear | None = None,
    ) -> None:
        super().__init__()
        self.routing = routing
        self.gate = gate
        self.experts = nn.ModuleList(experts)
        self.shared_expert = shared_expert
        self.shared_expert_gate = shared_expert_gate

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[T, H] -> [T, H]."""
        inputs = [x, self.gate(x, step)]
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            inputs += [self.shared_expert(x, step), self.shared_expert_gate(x, step)]
        # An expert's rows are not the step's tokens: it sees no step.
        runs = [ops.on_rows(lambda rows, e=expert: e(rows, None), x) for expert in self.experts]
        return ops.host(_Mixture(self.routing, runs), inputs, self.gate.shape.in_features)


@dataclass(frozen=True)
class _Mixture:
    """What is computed on the host.

    Attributes:
        runs: each expert, as a function of its rows [n, H].
    """

    routing: Routing
    runs: list[Callable[[Tensor], Tensor]]

    def __call__(
        self, x: Tensor, scores: Tensor, shared: Tensor | None = None, shared_score: Tensor | None = None
    ) -> Tensor:
        weights, experts = self.routing.choose(scores)
        weights, experts = weights.flatten(), experts.flatten()
        by_expert = experts.argsort(stable=True)
        total = torch.zeros(x.shape, dtype=torch.float32)
        start = 0
        for expert, count in enumerate(torch.bincount(experts, minlength=len(self.runs)).tolist()):
            if count:
                chosen = by_expert[start : start + count]
                rows = chosen // self.routing.top_k
                answer = self.runs[expert](x.index_select(0, rows)).float()
                total.index_add_(0, rows, answer.mul_(weights[chosen, None]))
                start += count
        if shared is not None and shared_score is not None:
            total += shared.float() / torch.neg(shared_score.float()).exp_().add_(1.0)  # torch's sigmoid has two bodies
        return total.to(x.dtype)
