"""The ways in which a level cuts up large products: all have the same bits, and the fastest is found in a moment."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, takewhile

import pytest
import torch
from native_cases import Product, Threads, draw, packed
from sweeping import each

from quire.ops.native.library import Target, library, loaded_library
from quire.ops.native.matrix import PackedMatrix, row_bytes, weight_format
from quire.ops.native.structs import Epilogue, Type

pytestmark = pytest.mark.skipif(library() is None, reason="no compiled kernels")

TYPES = [Type.BF16, Type.BF16_TURNED, Type.I8, Type.I4, Type.W8A8, Type.Q4_K, Type.Q8_0, Type.U4_128]


@pytest.fixture
def choose(level: str) -> Iterator[Callable[[int], int]]:
    """Chooses a way of the level, which uses the first one again afterwards."""
    chosen = partial(loaded_library().quire_tune, Target(level).kernels, 2)
    yield chosen
    chosen(0)


def ways_of(choose: Callable[[int], int]) -> list[int]:
    """The ways of a level that has several; the first one is chosen."""
    ways = list(takewhile(lambda way: choose(way) == way, count()))
    if not ways:
        pytest.skip("a level of one way")
    choose(0)
    return ways


def matrix_of(type: Type, features: int, cols: int) -> PackedMatrix:
    if not weight_format(type).block_values:
        return packed(draw(features, cols), type)
    matrix = PackedMatrix(
        torch.zeros(PackedMatrix.data_shape(features, cols, type), dtype=torch.uint8), None, features, cols, type
    )
    codes = torch.randint(0, 0x30, (features, row_bytes(type, cols)), generator=torch.Generator().manual_seed(1))
    matrix.pack(codes.to(torch.uint8), 0)  # whose f16 are numbers
    return matrix


@each({"type": TYPES, ("features", "cols"): [(40, 2560), (400, 512), (21, 256)]})
def test_all_ways_have_the_same_bits(
    level: str, choose: Callable[[int], int], type: Type, features: int, cols: int
) -> None:
    """Sums that go to memory once and often, groups of blocks that are whole and not, one thread and two."""
    ways = ways_of(choose)
    product, x = Product(matrix_of(type, features, cols), torch.bfloat16), draw(600, cols, dtype=torch.bfloat16)
    expected = product(x)
    assert expected.isfinite().all()
    for way in ways:
        assert choose(way) == way
        for rows in (32, 33, 64, 112, 545):
            with Threads(1 + rows % 2):
                assert torch.equal(product(x[:rows]), expected[:rows]), (way, rows)


@pytest.mark.parametrize(("type", "cols"), [(Type.I4, 576), (Type.W8A8, 576), (Type.W8A8, 608)])
def test_gated_products_have_the_same_bits_every_way(
    level: str, choose: Callable[[int], int], type: Type, cols: int
) -> None:
    ways = ways_of(choose)
    product = Product(matrix_of(type, 320, cols), torch.bfloat16, function=Epilogue.SILU_MUL)
    x = draw(200, cols, dtype=torch.bfloat16)
    expected = product(x[:30])  # these are few
    for way in ways:
        choose(way)
        assert torch.equal(product(x)[:30], expected), way


def test_the_fastest_way_is_found_in_a_moment(level: str, choose: Callable[[int], int]) -> None:
    has_ways = choose(0) == 0
    start = time.perf_counter()
    found = choose(-1)
    assert has_ways == (found >= 0)
    assert choose(found) == found or not has_ways
    assert choose(10**6) == -1
    assert time.perf_counter() - start < 20  # emulated, on a busy machine
