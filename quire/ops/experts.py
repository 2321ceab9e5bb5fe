"""Mixtures of experts, of which each token goes to a few: the choice among them, and the sum of what they answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from quire.ops.gather import Meeting, gather_experts
from quire.ops.native.builder import ProgramBuilder, Value, recorded
from quire.ops.native.structs import Type
from quire.ops.table import op

LEAST_SUM = 1e-20  # of weights that others are divided by: all sigmoids may be 0; as csrc/route.h has it


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
class Routing:
    """How a token chooses its experts.

    Attributes:
        num_experts: E.
        top_k: experts of each token, of 1 to E.
        renormalize: whether the weights of those chosen are divided by their sum.
        by_sigmoid: weights are sigmoids of scores, and not their softmax.
        factor: on weights.
        bias: float32 [E], added to weights where experts are chosen, and not to what they weigh (arXiv:2408.15664).
    """

    num_experts: int
    top_k: int
    renormalize: bool
    by_sigmoid: bool = False
    factor: float = 1.0
    bias: Tensor | None = None


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
def route(scores: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """The `top_k` experts of each token: scores [T, E] -> weights, float32 [T, k], and experts, integers [T, k].

    In any order; of equals the first is chosen.
    """
    wide = scores.float()
    if routing.by_sigmoid:
        shares = torch.neg(wide).exp_().add_(1.0).reciprocal_()  # torch's sigmoid has two bodies
    else:
        wide = (wide - wide.amax(-1, keepdim=True)).exp_()
        shares = wide / wide.sum(-1, keepdim=True)
    keys = shares if routing.bias is None else shares + routing.bias
    experts = torch.argsort(keys, stable=True, dim=-1, descending=True)[:, : routing.top_k]
    weights = shares.gather(-1, experts)
    if routing.renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_(min=LEAST_SUM)
    return weights if routing.factor == 1.0 else weights * routing.factor, experts


@op
def mix(x: Tensor, weights: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
    """``sum of weight * expert(x)``: [T, H], [T, k], [T, k] -> float32 [T, H], in the order of the experts' numbers."""
    by_expert, order = chosen.flatten().sort(stable=True)
    counts = torch.bincount(by_expert, minlength=experts.count).tolist()
    answers = x.new_empty(len(order), x.shape[1])
    for i, (slots, own) in enumerate(zip(order.split(counts), answers.split(counts), strict=True)):
        if i in experts.runs and len(slots):
            own.copy_(experts.runs[i](x[slots // chosen.shape[1]]))
    if (owners := experts.owners) is not None:
        answers = owners.group.gather_rows(answers, by_expert, owners.starts)
    total = torch.zeros_like(x, dtype=torch.float32)
    for slots, own in zip(order.split(counts), answers.split(counts), strict=True):
        total.index_add_(0, slots // chosen.shape[1], own.float().mul_(weights.flatten()[slots, None]))
    return total


@op
def mixture(x: Tensor, scores: Tensor, shared: Sequence[Tensor], routing: Routing, experts: Experts) -> Tensor:
    """What `experts` answer x, [T, H], chosen and weighed by scores [T, E], and what a shared one does: -> [T, H].

    shared: nothing, or its answers [T, H], and maybe scores [T, 1] whose sigmoid is their weight.
    """
    total = mix(x, *route(scores, routing), experts)
    if shared:
        divisors = [1.0, *(torch.neg(gate.float()).exp_().add_(1.0) for gate in shared[1:])]
        total += shared[0].float() / divisors[-1]
    return total.to(x.dtype)


@mixture.native
def _build(x: Value, scores: Value, shared: Sequence[Value], routing: Routing, experts: Experts) -> Value:
    builder, top_k, bias = x.builder, routing.top_k, routing.bias
    own = ProgramBuilder(builder.dtype, builder.target)
    rows: Any = recorded(own.input(x.width))
    program = own.finish([cast(Any, run(rows)) for run in experts.runs.values()], apart=True)
    told: dict[str, Any] = {"count": experts.count, "top_k": top_k}
    how: dict[str, Any] = {name: getattr(routing, name) for name in ("renormalize", "by_sigmoid", "factor")}
    how["bias"] = None if bias is None else builder.address(bias)
    routes = builder.append("route", [scores], 2 * top_k, type=Type.F32, **told, **how)
    # From row to row no whole pages: those that a kernel writes at once would meet in the same few lines of L1.
    told |= {"width": x.width, "stride": x.width + 32 * (x.width * x.dtype.itemsize % 4096 == 0)}
    here: dict[str, Any] = {"first": min(experts.runs), "num_here": len(experts.runs)}
    here |= {"program": builder.part(program), "ends": builder.address(torch.tensor(program.plan.ends))}
    answers = builder.append("experts", [x, routes], top_k * told["stride"], **told, **here)
    if (owners := experts.owners) is not None:
        answers = gather_experts(answers, routes, owners.group, owners.starts, **told)
    return builder.append("mix", [answers, routes, *shared], x.width, **told)
