"""What adapters add to products and tables, on every level: right against fp64, and each row a function of its own."""

import pytest
import torch
from native_cases import DTYPES, EPSILON, Threads, draw, packed
from torch import Tensor

from quire import ops
from quire.ops.lora import LoraLayer, LoraMatrices, TokenSlots
from quire.ops.native.builder import ProgramBuilder, recorded
from quire.ops.native.program import Program
from quire.ops.native.structs import TYPE_OF

RANKS = [1, 3, 8, 17]
# Features in, and of each part.
SHAPES = [(5, [7]), (40, [20, 9, 3]), (100, [64, 32, 32]), (257, [199])]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}


def layers(inner: int, parts: list[int], dtype: torch.dtype, tokens: TokenSlots) -> tuple[LoraLayer, LoraLayer]:
    """A layer for kernels and one for torch, with an adapter of each rank; the last one lacks a part."""
    starts = [sum(parts[:i]) for i in range(len(parts) + 1)]
    both = LoraLayer(starts, len(RANKS), 20, dtype, tokens), LoraLayer(starts, len(RANKS), 20, dtype, None)
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
    y = ops.lora(x, ops.linear(x, matrices), layer, None)  # type: ignore[arg-type]
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
    expected = ops.lora(x.double(), x.double() @ weight.to(dtype).double().t(), plain, slots)
    assert torch.allclose(whole.double(), expected, rtol=4 * EPSILON[dtype], atol=TOLERANCE[dtype] * inner**0.5)
    for start, end in ((0, 1), (19, 23), (33, 70), (47, 51)):
        tokens.set(slots[start:end].clone())
        assert torch.equal(ran(program, x[start:end], width), whole[start:end])
    tokens.set(slots)
    with Threads(2):
        assert torch.equal(ran(program, x, width), whole)
    assert torch.equal(ran(product(weight, native, dtype, parts=parts), x, width), whole)


@pytest.mark.parametrize("features", [32, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_before_a_gate(level: str, dtype: torch.dtype, features: int) -> None:
    tokens = TokenSlots()
    native, plain = layers(40, [features, features], dtype, tokens)
    weight, x = draw(2 * features, 40, seed=3) * 0.2, draw(37, 40, dtype=dtype) * 0.2
    slots = torch.arange(37, dtype=torch.int32) % (len(RANKS) + 1) - 1
    tokens.set(slots)
    found = ran(product(weight, native, dtype, gated=True), x, features)
    gate, up = ops.lora(x.double(), x.double() @ weight.to(dtype).double().t(), plain, slots).chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    assert torch.allclose(found.double(), expected, rtol=0.05, atol=TOLERANCE[dtype] * 4)
