"""What adapters add to products and tables, on every level: right against fp64, and each row a function of its own."""

from typing import Any

import pytest
import torch
from native_cases import DTYPES, EPSILON, Threads, draw, packed, run
from torch import Tensor

from quire import ops
from quire.attention.step import AdapterBatch
from quire.ops.batch import AttentionBatch
from quire.ops.lora import LoraLayer, LoraMatrices, TokenSlots
from quire.ops.native.builder import ProgramBuilder, recorded
from quire.ops.native.program import Program, StepData
from quire.ops.native.structs import TYPE_OF

RANKS = [1, 3, 8, 17]
# Features in, and of each part.
SHAPES = [(5, [7]), (40, [20, 9, 3]), (100, [64, 32, 32]), (257, [199])]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}


def layers(inner: int, parts: list[int], dtype: torch.dtype, tokens: TokenSlots) -> tuple[LoraLayer, LoraLayer]:
    """A layer for kernels and one for torch, with an adapter of each rank; the last one lacks a part."""
    starts = [sum(parts[:i]) for i in range(len(parts) + 1)]
    both = tuple(LoraLayer(starts, len(RANKS), 20, torch.empty(0, dtype=dtype), rows) for rows in (tokens, None))
    for slot, rank in enumerate(RANKS):
        own = {
            part: LoraMatrices(draw(rank, inner, seed=slot), draw(size, rank, seed=9 + slot), 0.25)
            for part, size in enumerate(parts[:-1] if slot == len(RANKS) - 1 and len(parts) > 1 else parts)
        }
        for layer in both:
            layer.put(slot, {part: layer.packed(part, matrices) for part, matrices in own.items()})
    return both


def product(
    weight: Tensor, layer: LoraLayer, dtype: torch.dtype, gated: bool = False, parts: list[int] | None = None
) -> Program:
    """`parts`: the rows of each of several matrices."""
    builder = ProgramBuilder(dtype)
    x = recorded(builder.input(weight.shape[1]))
    matrices = [packed(part, TYPE_OF[dtype]) for part in weight.split(parts or [len(weight)])]
    y = ops.lora(x, ops.linear(x, matrices), layer, [])  # type: ignore[arg-type]
    return builder.finish(ops.silu_and_mul(y) if gated else y)  # type: ignore[arg-type]


def ran(program: Program, x: Tensor, width: int) -> Tensor:
    out = torch.empty(len(x), width, dtype=x.dtype)
    program.run([x, out])
    return out


@pytest.mark.parametrize(("inner", "parts"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_reference_and_no_row_depends_on_another(
    level: str, dtype: torch.dtype, inner: int, parts: list[int]
) -> None:
    tokens, width = TokenSlots(), sum(parts)
    native, plain = layers(inner, parts, dtype, tokens)
    weight, x = draw(width, inner, seed=3), draw(70, inner, dtype=dtype)
    slots = torch.randint(-1, len(RANKS), (70,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    slots[20:50] = 2  # together
    program = product(weight, native, dtype)
    base = ran(program, x, width)
    tokens.set(slots)
    whole = ran(program, x, width)
    assert torch.equal(whole[slots < 0], base[slots < 0])
    expected = ops.lora(x.double(), x.double() @ weight.to(dtype).double().t(), plain, AdapterBatch(slots).rows)
    assert torch.allclose(whole.double(), expected, rtol=4 * EPSILON[dtype], atol=TOLERANCE[dtype] * inner**0.5)
    for start, end in ((0, 1), (19, 23), (33, 70), (47, 51)):
        tokens.set(slots[start:end].clone())
        assert torch.equal(ran(program, x[start:end], width), whole[start:end])
    tokens.set(slots)
    with Threads(2):
        assert torch.equal(ran(program, x, width), whole)
    assert torch.equal(ran(product(weight, native, dtype, parts=parts), x, width), whole)


def test_many_long_rows(level: str) -> None:
    """Products take some of them at a time, each with the adapters of its own rows."""
    tokens = TokenSlots()
    native, _ = layers(16384, [16], torch.bfloat16, tokens)
    x = draw(450, 16384, dtype=torch.bfloat16)
    slots = (torch.arange(450, dtype=torch.int32) % (len(RANKS) + 1)) - 1
    program = product(draw(16, 16384, seed=3), native, x.dtype)
    tokens.set(slots)
    whole = ran(program, x, 16)
    for start, end in ((0, 30), (140, 210), (300, 330), (449, 450)):
        tokens.set(slots[start:end].clone())
        assert torch.equal(ran(program, x[start:end], 16), whole[start:end]), start


@pytest.mark.parametrize("features", [32, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_before_a_gate(level: str, dtype: torch.dtype, features: int) -> None:
    tokens = TokenSlots()
    native, plain = layers(40, [features, features], dtype, tokens)
    weight, x = draw(2 * features, 40, seed=3) * 0.2, draw(37, 40, dtype=dtype) * 0.2
    slots = torch.arange(37, dtype=torch.int32) % (len(RANKS) + 1) - 1
    tokens.set(slots)
    found = ran(product(weight, native, dtype, gated=True), x, features)
    gate, up = ops.lora(x.double(), x.double() @ weight.to(dtype).double().t(), plain, AdapterBatch(slots).rows).chunk(
        2, -1
    )
    expected = torch.nn.functional.silu(gate) * up
    assert torch.allclose(found.double(), expected, rtol=0.05, atol=TOLERANCE[dtype] * 4)


@pytest.mark.parametrize("size", [5, 40, 257])
@pytest.mark.parametrize("dtype", DTYPES)
def test_virtual_tokens_are_rows_by_position(level: str, dtype: torch.dtype, size: int) -> None:
    """Some rows are an adapter's own, some have its additions, and the others are the table's, whatever is beside."""
    tokens, table = TokenSlots(), draw(50, size, dtype=dtype)
    both = tuple(LoraLayer([0, size], 3, 4, torch.empty(0, dtype=dtype), rows) for rows in (tokens, None))
    for layer in both:
        layer.put(0, {0: layer.virtual(draw(6, size, seed=1))})
        layer.put(1, {0: layer.packed(0, LoraMatrices(draw(50, 4, seed=2), draw(size, 4, seed=3), 0.5))})
        layer.put(2, {0: layer.virtual(draw(1, size, seed=4))})
    builder = ProgramBuilder(dtype)
    index, positions = builder.ids, recorded(builder.positions)
    value: Any = ops.embedding(index, packed(table, TYPE_OF[dtype]))  # type: ignore[arg-type]
    program = builder.finish(ops.lora_rows(index, value, both[0], [], positions))  # type: ignore[arg-type]
    drawn = torch.Generator().manual_seed(1)
    ids, slots = torch.randint(0, 50, (41,), generator=drawn), torch.randint(-1, 3, (41,), generator=drawn)
    where, slots = torch.randint(0, 9, (41,), generator=drawn), slots.to(torch.int32)
    table_of_one = torch.zeros(1, 1, dtype=torch.int64)
    batch = AttentionBatch(torch.tensor([0, 41]), torch.tensor([41]), table_of_one, slot_mapping=where, block_size=64)
    step = StepData(ids, where, batch)
    plain = run(program, [], size, dtype, step)
    assert torch.equal(plain, table[ids])
    tokens.set(slots)
    found = run(program, [], size, dtype, step)
    expected = ops.lora_rows(ids, table[ids], both[1], AdapterBatch(slots).rows, where)
    adds = (slots == 1)[:, None]
    assert torch.equal(found.masked_fill(adds, 0), expected.masked_fill(adds, 0))
    assert torch.allclose(found.float(), expected.float(), rtol=4 * EPSILON[dtype], atol=1e-5)
    assert torch.equal(
        found[(slots == 0) & (where < 6)], draw(6, size, seed=1).to(dtype)[where[(slots == 0) & (where < 6)]]
    )
    layer = both[0]
    layer.put(0, {0: layer.packed(0, LoraMatrices(draw(50, 4, seed=2), draw(size, 4, seed=3), 0.5))})
    again = run(program, [], size, dtype, step)
    assert torch.equal(again[slots == 1], found[slots == 1])
    assert not torch.equal(again[slots == 0], found[slots == 0])
