"""Groups of ranks, here threads with a view each: what they gather, recorded and not, agree upon, and how they end."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.distributed import groups
from quire.distributed.groups import Group, GroupAbortedError, segment_bytes
from quire.ops.batch import AttentionBatch
from quire.ops.native.builder import ProgramBuilder
from quire.ops.native.library import Target, levels
from quire.ops.native.matrix import PackedMatrix
from quire.ops.native.program import StepData
from quire.ops.native.structs import Type

T = TypeVar("T")
STARTS = (0, 3, 8, 9)


def on_ranks(home: Path, function: Callable[[Group], T], num_bytes: int = segment_bytes(100), size: int = 3) -> list[T]:
    path = home / "group"
    path.write_bytes(bytes(num_bytes))
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: function(Group(str(path), rank, size)), range(size)))


@pytest.fixture(params=["native", "plain"])
def waiting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meetings in the kernels' library, and without one."""
    if request.param == "plain":
        monkeypatch.setattr(groups, "library", lambda: None)
    elif levels() == ["torch"]:
        pytest.skip("needs the compiled kernels")


def columns(group: Group, whole: Tensor) -> Tensor:
    return whole[:, STARTS[group.rank] : STARTS[group.rank + 1]].contiguous()


@pytest.mark.usefixtures("waiting")
@pytest.mark.parametrize("rows_at_once", [2, 100])
def test_gathering(tmp_path: Path, rows_at_once: int) -> None:
    whole, ids = torch.randn(7, 9), torch.tensor([0, 8, 2, 3, 7, 8, 1])

    def run(group: Group) -> list[Tensor]:
        own = torch.full_like(whole, torch.nan)
        has = (ids >= STARTS[group.rank]) & (ids < STARTS[group.rank + 1])
        own[has] = whole[has]
        found = [ops.gather(columns(group, whole) + i, group, STARTS) - i for i in range(5)]
        return [*found, ops.gather_rows(own, ids, group, STARTS)]

    for found in on_ranks(tmp_path, run, 4096 + 2 * rows_at_once * 9 * 4):
        torch.testing.assert_close(found[:-1], [whole] * 5)
        assert torch.equal(found[-1], whole)


@pytest.mark.usefixtures("waiting")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows_at_once", [2, 100])
def test_reducing(tmp_path: Path, dtype: torch.dtype, rows_at_once: int) -> None:
    addends = torch.randn(3, 7, 9).to(dtype)
    expected = (addends[0].float() + addends[1] + addends[2]).to(dtype)
    size = 4096 + 2 * rows_at_once * 3 * 9 * dtype.itemsize
    for found in on_ranks(tmp_path, lambda group: [ops.reduce(addends[group.rank], group) for _ in range(5)], size):
        assert all(torch.equal(one, expected) for one in found)


def steps(ids: Tensor) -> StepData:
    ints = torch.arange(len(ids), dtype=torch.int32)
    one = torch.tensor([0, len(ids)], dtype=torch.int32)
    lens, tables = one[1:], one[:1, None]
    return StepData(ids, ints, AttentionBatch(one, lens, tables, slot_mapping=ints, block_size=16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows_at_once", [2, 100])
def test_recorded_gathering(level: str, tmp_path: Path, dtype: torch.dtype, rows_at_once: int) -> None:
    whole, ids = torch.randn(37, 9).to(dtype), torch.randint(0, 9, (37,), dtype=torch.int32)
    table = torch.randn(9, 40).to(dtype)

    def run(group: Group) -> tuple[Tensor, Tensor]:
        # Programs of as many threads take turns.
        builder = ProgramBuilder(dtype, Target(level, group.rank + 1))
        index: Any = builder.ids
        rows: Any = builder.input(40)
        slices: Any = builder.input(STARTS[group.rank + 1] - STARTS[group.rank])
        gathered: Any = ops.gather(slices, group, STARTS)
        whole_rows: Any = ops.gather_rows(rows, index, group, STARTS)
        program = builder.finish([gathered, whole_rows])
        found = torch.empty_like(whole), torch.empty(37, 40, dtype=dtype)
        own = ops.own_rows(ids, group, STARTS)
        program.run([table[own + STARTS[group.rank]], columns(group, whole), *found], steps(ids))
        return found

    for gathered, rows in on_ranks(tmp_path, run, 4096 + 2 * rows_at_once * 40 * dtype.itemsize):
        assert torch.equal(gathered, whole)
        assert torch.equal(rows, table[ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows_at_once", [2, 100])
def test_recorded_reducing(level: str, tmp_path: Path, dtype: torch.dtype, rows_at_once: int) -> None:
    """In the order of ranks, a residual last: rounded once."""
    addends, residual = torch.randn(3, 37, 41).to(dtype), torch.randn(37, 41).to(dtype)
    total = addends[0].float() + addends[1] + addends[2]

    def run(group: Group) -> tuple[Tensor, Tensor]:
        builder = ProgramBuilder(dtype, Target(level, group.rank + 1))
        inputs: list[Any] = [builder.input(41), builder.input(41)]
        alone: Any = ops.reduce(inputs[0], group)
        reduced: Any = ops.reduce(inputs[0], group)
        program = builder.finish([alone, ops.add(reduced, inputs[1])])
        found = torch.empty_like(residual), torch.empty_like(residual)
        program.run([addends[group.rank], residual, *found])
        return found

    for alone, added in on_ranks(tmp_path, run, 4096 + 2 * rows_at_once * 3 * 41 * dtype.itemsize):
        assert torch.equal(alone, total.to(dtype))
        assert torch.equal(added, (total + residual).to(dtype))


@pytest.mark.parametrize("type", [Type.F32, Type.BF16, Type.I8, Type.I4])
def test_a_residual_sum_after_a_gather_is_that_of_one_rank(level: str, tmp_path: Path, type: Type) -> None:
    """Fused with the product before it, where one rank fuses it: rounded as often, for every level of kernels."""
    dtype = torch.float32 if type is Type.F32 else torch.bfloat16
    starts, x, residual = (0, 32, 80, 97), torch.randn(21, 200).to(dtype), torch.randn(21, 97).to(dtype)
    weight, bias = torch.randn(97, 200), torch.randn(97).to(dtype)

    def run(rows: slice, group: Group | None = None) -> Tensor:
        builder = ProgramBuilder(dtype, Target(level, 1 if group is None else group.rank + 1))
        part = weight[rows]
        data = torch.zeros(PackedMatrix.data_shape(len(part), 200, type), dtype=torch.uint8)
        scales = torch.zeros(len(part)) if type is Type.I8 else None
        matrix = PackedMatrix(data, scales, len(part), 200, type)
        matrix.pack(part, 0, builder.target)
        inputs: list[Any] = [builder.input(200), builder.input(97)]
        product: Any = ops.linear(inputs[0], matrix, bias[rows].clone())
        if group is not None:
            product = ops.gather(product, group, starts)
            group.agree(None)
        total: Any = ops.add(product, inputs[1])
        out = torch.empty(21, 97, dtype=dtype)
        builder.finish(total).run([x, residual, out])
        return out

    expected = run(slice(None))
    ranges = [slice(*bounds) for bounds in zip(starts, starts[1:], strict=False)]
    for found in on_ranks(tmp_path, lambda group: run(ranges[group.rank], group)):
        assert torch.equal(found, expected)


@pytest.mark.usefixtures("waiting")
def test_agreeing(tmp_path: Path) -> None:
    values: list[Any] = [2.5, {"a": 1.0}, [3, "x" * 500], True]

    def run(group: Group) -> list[Any]:
        return [group.agree(value if group.rank == 0 else type(value)()) for value in values * 2]

    assert on_ranks(tmp_path, run) == [values * 2] * 3


@pytest.mark.usefixtures("waiting")
@pytest.mark.parametrize("late", [False, True])
def test_an_abort_wakes_who_waits(tmp_path: Path, late: bool) -> None:
    ended: list[float] = []

    def run(group: Group) -> None:
        if group.rank == 2:
            if late:
                time.sleep(0.2)  # the others are asleep
            ended.append(time.perf_counter())
            return group.abort()
        with pytest.raises(GroupAbortedError, match=rf"rank {group.rank} of 3 stops"):
            group.agree(0)
        ended.append(time.perf_counter())
        return None

    on_ranks(tmp_path, run)
    assert max(ended) - min(ended) < 1.0


def test_a_rank_alone_meets_nobody() -> None:
    group = Group(None, 1, 3, range(segment_bytes(100)))
    found = group.gather(columns(group, torch.ones(7, 9)), STARTS)
    assert found.shape == (7, 9)
    assert group.agree(5) == 5


def test_counters_wrap_around(tmp_path: Path) -> None:
    all_set = threading.Barrier(2)

    def run(group: Group) -> list[int]:
        group._arrivals[group.rank] = 2**32 - 4
        all_set.wait(60)
        return [group.agree(i) for i in range(9)]

    assert on_ranks(tmp_path, run, size=2) == [list(range(9))] * 2
