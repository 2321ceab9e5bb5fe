"""Rows put together of what the ranks of a group have of them: columns, whole rows, or addends.

A rank's range begins and ends where `starts` say, [ranks + 1] numbers from 0 on. Knows a group as a place to meet.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.ops.native.builder import StepIndex, Value
from quire.ops.table import op


class Meeting(Protocol):
    """What a group (`quire.distributed.groups.Group`) is to these operations."""

    rank: int
    size: int
    address: int
    capacity: int

    def after(self, name: str) -> Callable[[Tensor], Tensor] | None: ...
    def check(self) -> None: ...
    def gather(self, x: Tensor, starts: Sequence[int]) -> Tensor: ...
    def gather_rows(self, x: Tensor, ids: Tensor, starts: Sequence[int]) -> Tensor: ...
    def reduce(self, x: Tensor) -> Tensor: ...


@op
def gather(x: Tensor, group: Meeting, starts: Sequence[int]) -> Tensor:
    """Columns of all ranks, in order: [T, starts[rank + 1] - starts[rank]] -> [T, starts[-1]]."""
    return group.gather(x, starts)


@gather.native
def _build(x: Value, group: Meeting, starts: Sequence[int]) -> Value:
    return _append("gather", [x], group, starts, starts[-1])


@op
def gather_rows(x: Tensor, ids: Tensor, group: Meeting, starts: Sequence[int]) -> Tensor:
    """Rows of all ranks, each of which has those of the ids in its range: [T, H], [T] integers -> [T, H]."""
    return group.gather_rows(x, ids, starts)


@gather_rows.native
def _build_rows(x: Value, ids: StepIndex, group: Meeting, starts: Sequence[int]) -> Value:
    assert ids == StepIndex(ids.builder, by_position=False), "whole ids, as they are"
    return _append("gather_rows", [x], group, starts, x.width, needs_step=True)


@op
def reduce(x: Tensor, group: Meeting) -> Tensor:
    """The sum of all ranks' [T, N], in the order of ranks, in float32, rounded once: the same bits on all of them."""
    return group.reduce(x)


@reduce.native
def _build_reduce(x: Value, group: Meeting) -> Value:
    assert group.size * x.width * x.dtype.itemsize <= group.capacity
    return _append("reduce", [x], group, [0] * (group.size + 1), x.width)


@op
def own_rows(ids: Tensor, group: Meeting, starts: Sequence[int]) -> Tensor:
    """Where the rows of ids are in this rank's part of a table; of ids outside its range anywhere."""
    first, end = starts[group.rank], starts[group.rank + 1]
    return (ids - first).clamp_(0, end - first - 1)


@own_rows.native
def _build_own(ids: StepIndex, group: Meeting, starts: Sequence[int]) -> StepIndex:
    return ids + -starts[group.rank]


def gather_experts(answers: Value, routes: Value, group: Meeting, starts: Sequence[int], **told: Any) -> Value:
    """What all ranks' experts answer, of which each has those in its range; as `quire.ops.mixture` records them."""
    return _append("gather_experts", [answers, routes], group, starts, answers, **told)


def _append(
    name: str, reads: list[Value], group: Meeting, starts: Sequence[int], writes: int | Value, **more: Any
) -> Value:
    builder, rank, kind = reads[0].builder, group.rank, reads[0].type
    builder.check = group.check
    bounds = builder.address(torch.tensor(starts, dtype=torch.int64))
    told: dict[str, Any] = {"starts": bounds, "width": writes, "first": starts[rank], "rank": rank, "size": group.size}
    told |= {"meeting": group.address, "capacity": group.capacity} | more
    assert told["width"] * reads[0].dtype.itemsize <= group.capacity
    return builder.append(name, reads, writes, type=kind, after=group.after(name), **told)
