"""Mixtures of experts, of which each token goes to a few: the choice among them, and the sum of what they answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.ops.gather import Meeting
from quire.ops.table import op


@dataclass(frozen=True)
class Owners:
    """Of a group whose ranks have whole experts each: where each rank's start, and their end."""

    group: Meeting
    starts: tuple[int, ...]

    @property
    def own(self) -> range:
        """The experts that are here."""
        return range(self.starts[self.group.rank], self.starts[self.group.rank + 1])


@dataclass(frozen=True, eq=False)
class Experts:
    """Gated MLPs of one shape.

    Attributes:
        runs: each that is here, as a function of its rows [n, H].
        count: of all.
        owners: which rank has which; None where all are here, or parts of all.
        weights: of both products those of all of them: "weight" as `linear` takes it, "codes", "scales" and
            maybe "zeros" as `quantized_linear` does, maybe a "bias"; None where they are not like that.
        activation: between the two.
        addresses: where a kernel notes in its device's memory where weights are.
    """

    runs: Mapping[int, Callable[[Tensor], Tensor]]
    count: int
    owners: Owners | None
    weights: tuple[Sequence[Mapping[str, Tensor]], Sequence[Mapping[str, Tensor]]] | None
    activation: Callable[[Tensor], Tensor]
    addresses: dict[str, Tensor] = field(default_factory=dict)


@op
def route(scores: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The `top_k` experts of each token: scores [T, E] -> weights, float32 [T, k], and experts, integers [T, k].

    In any order; of equals the first is chosen. renormalize: weights are divided by their sum.
    """
    wide = scores.float()
    wide = (wide - wide.amax(-1, keepdim=True)).exp_()
    shares, experts = torch.sort(wide / wide.sum(-1, keepdim=True), stable=True, dim=-1, descending=True)
    weights, experts = shares[:, :top_k], experts[:, :top_k]
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts


@op
def mix(x: Tensor, weights: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
    """``sum of weight * expert(x)``: [T, H], [T, k], [T, k] -> float32 [T, H], in the order of the experts' numbers."""
    top_k, weights, chosen = chosen.shape[1], weights.flatten(), chosen.flatten()
    by_expert = chosen.argsort(stable=True)
    total = torch.zeros_like(x, dtype=torch.float32)
    counts = torch.bincount(chosen, minlength=experts.count).tolist()
    users = {i: slots for i, slots in enumerate(by_expert.split(counts)) if len(slots)}
    rows = {i: slots // top_k for i, slots in users.items()}
    answers = {i: experts.runs[i](x.index_select(0, rows[i])) for i in users if i in experts.runs}
    if experts.owners is not None:  # summed in one rank's order all the same
        several = x.new_empty(len(chosen), x.shape[1])
        for i, answer in answers.items():
            several[users[i]] = answer
        several = experts.owners.group.gather_rows(several, chosen, experts.owners.starts)
        answers = {i: several[slots] for i, slots in users.items()}
    for i, slots in users.items():
        total.index_add_(0, rows[i], answers[i].float().mul_(weights[slots, None]))
    return total
