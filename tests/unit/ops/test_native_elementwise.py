"""Norms, activations, sums, embeddings and rotations, on every level: near fp64 and the twins, row by row."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from native_cases import (
    DENSE,
    DTYPES,
    EPSILON,
    FUNCTIONS,
    Threads,
    assert_near,
    at_page_end,
    draw,
    elementwise,
    packed,
    run,
)
from sweeping import each
from torch import Tensor
from unpacking import unpacked

from quire import ops
from quire.attention.native import NativeBackend
from quire.ops import AttentionSpec, activation
from quire.ops.batch import AttentionBatch
from quire.ops.native.builder import ProgramBuilder
from quire.ops.native.program import Caches, Program, StepData
from quire.ops.native.structs import GATED, TYPE_OF, Epilogue, Type

SIZES = [1, 2, 7, 40, 100, 128, 257, 1000]
ROWS = [1, 2, 7, 8, 9, 33, 70]


class Case(NamedTuple):
    """An operation on rows of x."""

    operation: Callable[[Any], Any]  # of tensors, and of a builder's values
    exact: Callable[[Tensor], Tensor]  # the same in fp64
    error: float = 1e-6  # in fp32, of results of magnitude 1


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


def cases(size: int, dtype: torch.dtype) -> dict[str, Case]:
    weight, bias = (at_page_end(draw(size, dtype=dtype, seed=seed)) for seed in (1, 2))

    def layer_norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (size,), weight.double(), bias.double(), 1e-5)

    return {
        "rms_norm plus one": Case(
            lambda x: ops.rms_norm(x, weight, 1e-5, plus_one=True), lambda x: rms(x, weight.double() + 1), 6e-6
        ),
        "scale": Case(lambda x: ops.scale(x, 0.3), lambda x: x * 0.3),
        "times": Case(lambda x: x * 0.3, lambda x: x * 0.3),
        "softcap": Case(lambda x: ops.softcap(x, 2.5), lambda x: 2.5 * (x / 2.5).tanh()),
        "rms_norm": Case(lambda x: ops.rms_norm(x, weight, 1e-5), lambda x: rms(x, weight), 4e-6),
        "layer_norm": Case(lambda x: ops.layer_norm(x, weight, bias, 1e-5), layer_norm, 1e-5),
        "plain layer_norm": Case(
            lambda x: ops.layer_norm(x, None, None, 1e-5), lambda x: F.layer_norm(x, (size,), eps=1e-5), 1e-5
        ),
        "gelu": Case(ops.gelu, F.gelu),
        "gelu_tanh": Case(ops.gelu_tanh, lambda x: F.gelu(x, approximate="tanh")),
        "relu": Case(ops.relu, F.relu, 0.0),
        "relu2": Case(ops.relu2, lambda x: F.relu(x).square()),
        "twice": Case(lambda x: x + x, lambda x: x + x, 0.0),
    }


NAMES = list(cases(1, torch.float32))


@each({"size": SIZES, "name": NAMES, "dtype": DTYPES})
def test_near_fp64_and_the_twin_and_row_by_row(level: str, dtype: torch.dtype, name: str, size: int) -> None:
    case = cases(size, dtype)[name]
    x = draw(70, size, dtype=dtype, seed=5) * 3
    check_rows(case, x, lambda rows: elementwise(case.operation, rows))


def check_rows(case: Case, x: Tensor, ours: Callable[[Tensor], Tensor]) -> None:
    whole = ours(x)
    assert_near(whole, case.exact(x.double()), case.error * (1 + case.exact(x.double()).abs()))
    twin = case.operation(x).double()
    if x.shape[1] > 1:  # of one feature there is nothing but the twin's rounding left once the mean is subtracted
        assert_near(whole, twin, 4 * case.error * (1 + twin.abs()) + twin.abs() * EPSILON[x.dtype], roundings=2)
    for rows in ROWS:
        start = (rows * 13) % (len(x) - rows + 1)
        assert torch.equal(ours(x[start : start + rows]), whole[start : start + rows]), rows
    with Threads(2):
        assert torch.equal(ours(x), whole)
    spoiled = x.clone()
    spoiled[3], spoiled[9] = torch.nan, torch.inf
    others = [i for i in range(len(x)) if i not in (3, 9)]
    found = ours(spoiled)
    assert torch.equal(found[others], whole[others])
    # relu(NaN) is NaN in torch as well: a broken model must show.
    assert found[3].isnan().all()


@each({"size": SIZES, "dtype": DTYPES, "function": GATED})
def test_gated_activations(level: str, function: Epilogue, dtype: torch.dtype, size: int) -> None:
    error = 2e-6 if function is Epilogue.SILU_MUL else 1e-5  # erf's and tanh's, times the second half
    case = Case(activation.FUNCTIONS[function], FUNCTIONS[function], error)
    check_rows(case, draw(70, 2 * size, dtype=dtype) * 3, lambda rows: elementwise(case.operation, rows))


@each({"size": SIZES, "dtype": DTYPES, "norm": ["rms", "layer"]})
def test_sum_and_its_norm(level: str, norm: str, dtype: torch.dtype, size: int) -> None:
    """The residual stream: both the norm of the sum, and the sum."""
    x, residual, weight = (draw(19, size, dtype=dtype, seed=seed) for seed in range(3))
    weight = weight[0].clone()
    builder = ProgramBuilder(dtype)
    pair: Any = builder.input(size), builder.input(size)
    if norm == "rms":
        total = ops.add(*pair)
        normed = ops.rms_norm(total, weight, 1e-5)
        expected = rms((x + residual).double(), weight)
    else:
        total = ops.add(*pair)
        normed = ops.layer_norm(total, weight, None, 1e-5)
        expected = F.layer_norm((x + residual).double(), (size,), weight.double(), None, 1e-5)
    found = run(builder.finish(normed + total), [x, residual], size, dtype)
    exact = expected + (x + residual).double()
    assert_near(found, exact, 1e-5 + expected.abs() * EPSILON[dtype], roundings=2)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("silu_and_mul", [-1e4, 1e4, -88.0, 2.0, 2.0, 2.0], [0.0, 2e4, 0.0]),
        ("gelu", [-1e4, 1e4, 20.0, -20.0], [0.0, 1e4, 20.0, 0.0]),
        ("gelu_tanh", [-1e4, 1e4, 20.0, -20.0], [0.0, 1e4, 20.0, 0.0]),
    ],
)
def test_large_numbers(level: str, name: str, values: list[float], expected: list[float]) -> None:
    found = elementwise(getattr(ops, name), torch.tensor([values]))
    torch.testing.assert_close(found, torch.tensor([expected]), atol=1e-30, rtol=1e-6)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_activations_all_along_their_range(level: str, name: str) -> None:
    x = torch.linspace(-12, 12, 40_001)[None]
    expected = F.gelu(x.double(), approximate="tanh" if name == "gelu_tanh" else "none")
    assert_near(elementwise(getattr(ops, name), x), expected, 3e-7 * (1 + x.double().abs()))


def step_of(ids: Tensor, positions: Tensor) -> StepData:
    """A step of one sequence, for programs that only look up."""
    batch = AttentionBatch(
        query_start_loc=torch.tensor([0, len(ids)]),
        seq_lens=torch.tensor([len(ids)]),
        block_tables=torch.zeros(1, 1, dtype=torch.int64),
        slot_mapping=torch.arange(len(ids)),
        block_size=1024,
    )
    return StepData(ids, positions, batch)


def embedded(index: Any, table: Any) -> Any:
    return ops.embedding(index, table)


@each({"size": SIZES, "type": DENSE, "dtype": DTYPES})
def test_embedding(level: str, dtype: torch.dtype, type: Type, size: int) -> None:
    table, ids = packed(draw(50, size), type), torch.randint(0, 50, (41,), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(41) + 4

    def lookup(by_position: bool, offset: int = 0) -> Tensor:
        builder = ProgramBuilder(dtype)
        index = (builder.positions if by_position else builder.ids) + offset
        program = builder.finish(embedded(index, table))
        return run(program, [], size, dtype, step_of(ids, positions))

    rows = unpacked(table).to(dtype)
    assert torch.equal(lookup(False), rows[ids])
    assert torch.equal(lookup(True), rows[positions])
    assert torch.equal(lookup(True, 2), rows[positions + 2])
    with Threads(2):
        assert torch.equal(lookup(False), rows[ids])


@each({"type": DENSE, "dtype": DTYPES})
def test_a_row_beyond_the_table_is_zeros(level: str, dtype: torch.dtype, type: Type) -> None:
    """Never foreign memory, on whichever side of the table: here an unreadable page follows it."""
    table = packed(draw(50, 40), type)
    ids = torch.tensor([50, 3, -1, 49, 2**31 - 1, -(2**31), 64095])
    builder = ProgramBuilder(dtype)
    by_id = builder.finish(embedded(builder.ids, table))
    builder = ProgramBuilder(dtype)
    by_position = builder.finish(embedded(builder.positions + 2, table))
    rows = unpacked(table).to(dtype)
    found = run(by_id, [], 40, dtype, step_of(ids, ids))
    assert torch.equal(found[[1, 3]], rows[[3, 49]])
    assert not found[[0, 2, 4, 5, 6]].any()
    positions = torch.tensor([48, 47, 8001])
    found = run(by_position, [], 40, dtype, step_of(positions, positions))
    assert torch.equal(found[1], rows[49])
    assert not found[[0, 2]].any()


@each(
    {
        ("head_dim", "rotary_dim"): [(8, 8), (40, 20), (64, 64), (80, 6), (128, 128), (256, 64)],
        "norms": [False, True],
        "own_table": [False, True],
        "dtype": DTYPES,
    }
)
def test_queries_are_normed_and_rotated_in_place(
    level: str, dtype: torch.dtype, norms: bool, own_table: bool, head_dim: int, rotary_dim: int
) -> None:
    """Keys and values go to the cache, see tests/unit/attention; their columns of qkv stay as they were."""
    num_tokens = 19
    angles = torch.randn(60, rotary_dim // 2).repeat(1, 2)
    cos_sin = at_page_end(torch.cat((angles[:, : rotary_dim // 2].cos(), angles[:, rotary_dim // 2 :].sin()), 1))
    weight = draw(head_dim, dtype=dtype, seed=1)
    q_norm, k_norm = (weight, weight * 2) if norms else (None, None)
    builder = ProgramBuilder(dtype)
    qkv = builder.input(5 * head_dim)
    spec = AttentionSpec(3, 1, head_dim, 1.0, q_norm=q_norm, k_norm=k_norm, norm_eps=1e-5, rope=cos_sin)
    if own_table:
        spec = replace(spec, rope=at_page_end(torch.stack((torch.full_like(cos_sin, math.nan), cos_sin))))
    program = builder.finish(ops.attend(ops.prepare(qkv, spec), spec))
    positions = torch.randperm(60, generator=torch.Generator().manual_seed(1))[:num_tokens]
    x = draw(num_tokens, 5 * head_dim, dtype=dtype)
    found = prepare(program, x, positions, head_dim)
    query = x[:, : 3 * head_dim].view(num_tokens, 3, head_dim)
    if norms:
        query = rms(query.double(), weight)
    expected = rotated(query.double(), positions, cos_sin.double()).flatten(1)
    assert_near(found[:, : 3 * head_dim], expected, 4e-6 * (1 + expected.abs()))
    assert torch.equal(found[:, 3 * head_dim :], x[:, 3 * head_dim :])
    for i in range(num_tokens):
        assert torch.equal(prepare(program, x[i : i + 1], positions[i : i + 1], head_dim)[0], found[i])


def prepare(program: Program, x: Tensor, positions: Tensor, head_dim: int) -> Tensor:
    """What a program that prepares and attends leaves in x."""
    cache = torch.zeros(NativeBackend().kv_cache_shape(1, 1024, 1, head_dim), dtype=x.dtype)
    qkv, out = at_page_end(x), torch.empty(len(x), 3 * head_dim, dtype=x.dtype)
    program.run([qkv, out], step_of(positions, positions), Caches([cache], TYPE_OF[x.dtype]))
    return qkv.clone()


def rotated(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    size = cos_sin.shape[1]
    cos, sin = cos_sin[positions][:, None].chunk(2, -1)
    a, b = x[..., :size].chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., size:]), -1)
