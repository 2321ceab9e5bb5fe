"""Mixtures of experts as kernels: the torch they stand for, whatever else is in the batch, and who meets the rows."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from native_cases import DTYPES, EPSILON, Threads, at_page_end, draw, packed
from sweeping import each
from torch import Tensor

from quire import ops
from quire.distributed.groups import HEAD_BYTES, Group, segment_bytes
from quire.ops.native.builder import ProgramBuilder, recorded
from quire.ops.native.library import Target, default_target
from quire.ops.native.matrix import PackedMatrix
from quire.ops.native.structs import TYPE_OF

WIDTH, INNER = 50, 37


def answer(up: Any, down: Any, x: Tensor) -> Tensor:
    return ops.linear(ops.silu_and_mul(ops.linear(x, up)), down)


def experts_of(count: int, dtype: torch.dtype, pack: Callable[[Tensor], Any], width: int = WIDTH) -> ops.Experts:
    def expert(i: int) -> Callable[[Tensor], Tensor]:
        up = draw(2 * INNER, width, dtype=dtype, seed=2 * i) * width**-0.5
        down = draw(width, INNER, dtype=dtype, seed=2 * i + 1) * INNER**-0.5
        return partial(answer, pack(up), pack(down))

    return ops.Experts({i: expert(i) for i in range(count)}, count, None, None, ops.silu_and_mul)


class Mixture:
    """A mixture as torch has it, and as a program: called with x, scores, and what a shared expert answers if any."""

    def __init__(
        self,
        count: int,
        top_k: int,
        dtype: torch.dtype,
        *,
        renormalize: bool,
        shared: int,
        by_sigmoid: bool = False,
        biased: bool = False,
        owners: ops.Owners | None = None,
        target: Target | None = None,
    ) -> None:
        self.plain = experts_of(count, dtype, lambda dense: dense)
        bias = draw(count, seed=7) if biased else None
        self.told = (ops.Routing(count, top_k, renormalize, by_sigmoid, 2.5 if by_sigmoid else 1.0, bias),)
        builder = ProgramBuilder(dtype, target)
        x, scores = builder.input(WIDTH), builder.input(count)
        more = [builder.input(size) for size in [WIDTH, 1][:shared]]
        made = experts_of(count, dtype, lambda dense: packed(dense, TYPE_OF[dtype]))
        if owners is not None:
            made = replace(made, runs={i: made.runs[i] for i in owners.own}, owners=owners)
        given: Any = recorded(x), recorded(scores), [recorded(value) for value in more]
        value: Any = ops.mixture(*given, *self.told, made)
        self.program = builder.finish(value)

    def expected(self, x: Tensor, scores: Tensor, *shared: Tensor) -> Tensor:
        return ops.mixture(x, scores, shared, *self.told, self.plain)

    def __call__(self, *inputs: Tensor) -> Tensor:
        out = at_page_end(torch.full_like(inputs[0], torch.nan))
        self.program.run([*map(at_page_end, inputs), out])
        return out


def inputs_of(rows: int, count: int, dtype: torch.dtype, shared: int) -> list[Tensor]:
    shapes = [WIDTH, count, *[WIDTH, 1][:shared]]
    return [draw(rows, size, dtype=dtype, seed=90 + i) for i, size in enumerate(shapes)]


@each(
    {
        "shared": [0, 1, 2],
        "renormalize": [False, True],
        "choice": ["softmax", "sigmoid", "softmax with bias", "sigmoid with bias"],
        "sizes": [(3, 1), (5, 5), (40, 4), (130, 8)],
        "dtype": DTYPES,
    }
)
def test_what_torch_makes(
    level: str, dtype: torch.dtype, sizes: tuple[int, int], choice: str, renormalize: bool, shared: int
) -> None:
    how = {"by_sigmoid": "sigmoid" in choice, "biased": "bias" in choice}
    mixture = Mixture(*sizes, dtype, renormalize=renormalize, shared=shared, **how)
    for rows in (1, 2, 37):
        inputs = inputs_of(rows, sizes[0], dtype, shared)
        expected, found = mixture.expected(*inputs), mixture(*inputs)
        bound = 8 * EPSILON[dtype] * (1 + expected.double().abs()) + 1e-5
        assert ((found.double() - expected.double()).abs() <= bound).all()


@each({"dtype": DTYPES})
def test_no_row_has_a_say_in_anothers(level: str, dtype: torch.dtype) -> None:
    mixture = Mixture(20, 3, dtype, renormalize=True, shared=2)
    inputs = inputs_of(70, 20, dtype, shared=2)
    together = mixture(*inputs)
    for rows in (slice(0, 1), slice(7, 9), slice(9, 70)):
        assert torch.equal(mixture(*(x[rows].clone() for x in inputs)), together[rows])


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_that_share_experts_make_what_one_makes(dtype: torch.dtype, small: bool, tmp_path: Path) -> None:
    """Three ranks, one of them with an expert that nobody chooses; also where a few answers fill their buffers."""
    starts, inputs = (0, 12, 13, 20), inputs_of(70, 20, dtype, shared=2)
    inputs[1][:, 12] = -100.0
    expected = Mixture(20, 3, dtype, renormalize=True, shared=2)(*inputs)
    path = tmp_path / "group"
    path.write_bytes(bytes(HEAD_BYTES + 2 * 4096 if small else segment_bytes(100)))

    def run(rank: int) -> Tensor:
        group = Group(str(path), rank, 3)
        target = Target(default_target().level, rank + 1)  # ranks are threads here; with as many they would take turns
        owners = ops.Owners(group, starts)
        mixture = Mixture(20, 3, dtype, renormalize=True, shared=2, owners=owners, target=target)
        group.agree(None)
        return mixture(*inputs)

    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(run, range(3)):
            assert torch.equal(found, expected)


def test_threads_change_no_bit(level: str) -> None:
    inputs, found = inputs_of(70, 20, torch.bfloat16, shared=2), list[Tensor]()
    for count in (1, 2, 5):
        with Threads(count):
            found.append(Mixture(20, 3, torch.bfloat16, renormalize=False, shared=2)(*inputs))
    assert all(torch.equal(each, found[0]) for each in found)


@each({"dtype": DTYPES})
def test_of_equals_the_first_is_chosen(level: str, dtype: torch.dtype) -> None:
    """Also of scores that are too far below the best to have a weight."""
    mixture = Mixture(20, 3, dtype, renormalize=True, shared=0)
    x = draw(4, WIDTH, dtype=dtype)
    scores = torch.zeros(4, 20, dtype=dtype)
    scores[1, 5:] = 2.0
    scores[2] = -torch.arange(20) * 200.0
    scores[3, 19] = 300.0
    chosen = [[0, 1, 2], [5, 6, 7], [0, 1, 2], [0, 1, 19]]
    for row, own in enumerate(chosen):
        only = torch.full((1, 20), -torch.inf, dtype=dtype)
        only[0, own] = scores[row, own]
        assert torch.equal(mixture(x[row : row + 1], only), mixture(x, scores)[row : row + 1])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_none_stay_in_their_row(level: str, bad: float) -> None:
    mixture = Mixture(20, 3, torch.float32, renormalize=True, shared=0)
    inputs = inputs_of(12, 20, torch.float32, shared=0)
    whole = mixture(*inputs)
    inputs[1][4] = bad
    inputs[1][7, ::2] = bad
    found = mixture(*inputs)
    others = [row for row in range(12) if row not in (4, 7)]
    assert torch.equal(found[others], whole[others])
    assert found[4].isnan().all()


def test_an_experts_own_time_and_rows_are_told(level: str) -> None:
    mixture = Mixture(5, 2, torch.float32, renormalize=True, shared=0)
    mixture.program.spent()
    for rows in (1, 9):
        mixture(*inputs_of(rows, 5, torch.float32, shared=0))
    spent = mixture.program.spent()
    plain, inner = ([each for each in spent if each.inner is own] for own in (False, True))
    assert [(each.op, each.calls, each.rows) for each in plain] == [(op, 2, 10) for op in ("route", "experts", "mix")]
    products = [each for each in inner if each.op == "linear"]
    assert len(products) == 5 * 2
    assert sum(each.rows for each in products) == 10 * 2 * 2, "of each row two experts' two products"
    assert all(each.seconds > 0 for each in spent if each.calls)
    assert not any(each.calls or each.seconds for each in mixture.program.spent()), "since it was last asked for"


def test_matrices_of_several_types_are_an_expert_like_others(level: str) -> None:
    """A merged product in two parts has two instructions, and another expert one."""

    def pack(dense: Tensor) -> PackedMatrix | list[PackedMatrix]:
        kind = TYPE_OF[torch.float32]
        if len(dense) != 2 * INNER or dense[0, 0] > 0:
            return packed(dense, kind)
        return [packed(dense[:32], kind), packed(dense[32:], kind)]

    plain, builder = experts_of(9, torch.float32, lambda dense: dense), ProgramBuilder(torch.float32)
    x, scores = builder.input(WIDTH), builder.input(9)
    given: Any = recorded(x), recorded(scores), []
    made: Any = ops.mixture(*given, ops.Routing(9, 2, True), experts_of(9, torch.float32, pack))
    inputs = inputs_of(11, 9, torch.float32, shared=0)
    out = torch.empty_like(inputs[0])
    builder.finish(made).run([*inputs, out])
    torch.testing.assert_close(out, ops.mixture(*inputs, [], ops.Routing(9, 2, True), plain), rtol=1e-4, atol=1e-5)
