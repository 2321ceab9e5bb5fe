"""Matrices in the order of pairs: the same numbers in another order, and on AVX2 products of integers.

What the kernel is to compute is written here once more, in torch.
"""

from pathlib import Path

import pytest
import torch
from both_ways import told_both_ways
from native_cases import (
    DTYPES,
    FUNCTIONS,
    IN_BYTES,
    MAX_ROWS,
    ROWS,
    SHAPES,
    Product,
    Threads,
    as_integers,
    as_multiplied,
    assert_near,
    draw,
    packed,
    product_error,
)
from sweeping import each
from test_native_blocks import BLOCKS, OWN, blocks_of, matrix_of, reference
from torch import Tensor
from unpacking import unpacked

from quire.ops.native.library import TORCH, Target, levels
from quire.ops.native.matrix import PackedMatrix, weight_format, weight_order
from quire.ops.native.structs import GATED, Epilogue, Type
from quire.quantization.coded import quantize_int4

BF16 = torch.bfloat16
MADE = [Type.BF16_INTS, Type.I8, Type.W8A8, Type.I4, Type.W4A8]
KEPT = [type for type in BLOCKS + OWN if type not in (Type.F8_128, Type.C4_32)]  # whose codes are no integers


def in_pairs(level: str, type: Type) -> bool:
    """Whether a level multiplies pairs of integers where weights are of this type."""
    return weight_order(level, type)[1]


def made(dense: Tensor, type: Type) -> PackedMatrix:
    """`dense` in the order of pairs."""
    return packed(dense, type, paired=True)


@pytest.fixture
def of_integers(level: str, request: pytest.FixtureRequest) -> None:
    """For levels that multiply integers: of the test's type, if it has one."""
    if not in_pairs(level, request.node.callspec.params.get("type", Type.I4)):
        pytest.skip(f"{level} multiplies them as they are")


def expected(x: Tensor, values: Tensor, type: Type) -> Tensor:
    """x @ values.T in float64 as the integers give it."""
    columns = 64 if type in (Type.BF16_INTS, Type.I8) else 32
    return (as_multiplied(x, type).double() if type in IN_BYTES else as_integers(x, 14, columns)) @ values.double().t()


def exact_int4(dense: Tensor) -> Tensor:
    """What int4's codes and scales say, not rounded to bfloat16."""
    codes, scales = quantize_int4(dense)
    return codes * scales.repeat_interleave(32, 1)[:, : codes.shape[1]]


def test_how_levels_like_to_have_weights() -> None:
    wanted = {
        "avx2": {
            Type.BF16: (Type.BF16_INTS, True, 0),
            Type.I8: (Type.I8, True, 0),
            Type.Q4_K: (Type.Q4_K, True, 0),
            Type.W8A8: (Type.W8A8, True, 0),
            Type.W4A8: (Type.W4A8, True, 1),
        },
        "avx512_vnni": {Type.BF16: (Type.BF16_INTS, True, 2), Type.I8: (Type.W8A16, False, 2)},
        "avx512_bf16": {Type.I8: (Type.W8A16, False, 2), Type.I4: (Type.I4, True, 2), Type.W4A8: (Type.W4A8, False, 1)},
        "amx": {Type.BF16: (Type.BF16, False, 0), Type.W8A8: (Type.W8A8, False, 1), Type.Q4_K: (Type.Q4_K, False, 0)},
        "portable": {Type.I4: (Type.I4, False, 0)},
    }
    for level in set(levels()) - {TORCH}:
        for type, told in wanted.get(level, {}).items():
            assert weight_order(level, type) == told
        for type in (Type.F32, Type.F8_128, Type.C4_32):  # whose codes are no integers
            assert weight_order(level, type) == (type, False, 0)
        for type in Type:  # what it is made as stays that
            best = weight_order(level, type)
            assert weight_order(level, best[0]) == best
    if "avx512_bf16" in levels():
        assert weight_order("avx512_bf16", Type.BF16)[0] in (Type.BF16_TURNED, Type.BF16_INTS)


@each({"shape": SHAPES, "type": MADE})
def test_the_numbers_are_those_of_the_other_order(level: str, type: Type, shape: tuple[int, int]) -> None:
    dense = draw(*shape, dtype=BF16, seed=1) * 3
    dense[-1, -1] = -7.0
    for source in (dense, dense.float()):
        paired, plain = packed(source, type, paired=True), packed(source, type)
        assert torch.equal(unpacked(paired), unpacked(plain))
        if paired.scales is not None and plain.scales is not None:
            assert torch.equal(paired.scales, plain.scales)


@each({"shape": SHAPES})
def test_integers_of_bfloat16(level: str, shape: tuple[int, int]) -> None:
    """As fine as 64 may be that no sum of products is beyond 32 bits: the largest in twelve bits, mostly."""
    largest_sum = (2**31 - 1) // 16320 - 64
    dense = draw(*shape, seed=1) * 10.0 ** torch.linspace(-30, 30, shape[0])[:, None]
    dense[-1] = 0
    for source in (dense, dense.bfloat16()):
        expected = as_integers(dense.bfloat16(), 15, 64, largest_sum)
        assert torch.equal(unpacked(made(source, Type.BF16_INTS)).double(), expected)


@each({"type": KEPT})
def test_blocks_have_the_numbers_of_the_other_order(level: str, type: Type) -> None:
    """Also where rows begin within blocks of 16; every level makes the same bytes of them."""
    cols = 704 if type in OWN else 768
    source = blocks_of(type, 50, cols)
    whole = matrix_of(source, type, cols, paired=True)
    assert torch.equal(unpacked(whole), reference(source, type))
    parts = PackedMatrix(torch.zeros_like(whole.data), None, 50, cols, type, paired=True)
    for start, stop in ((21, 50), (0, 3), (3, 21)):
        parts.pack(source[start:stop], start, Target("portable", 2))
    assert torch.equal(parts.data, whole.data)


@pytest.mark.parametrize("type", MADE)
def test_parts_in_any_order_and_on_any_level(level: str, type: Type) -> None:
    dense = draw(75, 70)
    whole = made(dense, type)
    scales = torch.zeros(75) if weight_format(type).has_scales else None
    parts = PackedMatrix(torch.zeros_like(whole.data), scales, 75, 70, type, whole.paired)
    for start, stop in ((50, 75), (3, 18), (0, 3), (18, 19), (19, 50)):
        parts.pack(dense[start:stop], start, Target("portable", 2))
    assert torch.equal(parts.data, whole.data)
    if scales is not None and whole.scales is not None:
        assert torch.equal(scales, whole.scales)


@pytest.mark.parametrize("type", [Type.BF16_INTS, Type.I8, Type.I4, Type.Q4_K, Type.Q6_K])
def test_float32_rows_and_other_levels_meet_the_numbers(level: str, type: Type) -> None:
    """Bit for bit as in the other order, but where a level multiplies bfloat16 in an order of its own."""
    own_sums = level in ("amx", "avx512_bf16", "neon_bf16")
    shape = (72, 768)
    if type is Type.BF16_INTS:
        paired = made(draw(*shape, seed=1), type)
        plain = packed(unpacked(paired), Type.F32)
    else:
        make = packed if type in MADE else matrix_of
        pair = [draw(*shape, seed=1), type] if type in MADE else [blocks_of(type, *shape), type, shape[1]]
        paired, plain = make(*pair, paired=True), make(*pair)
    for dtype in [torch.float32] if in_pairs(level, type) else DTYPES:
        products = [Product(matrix, dtype) for matrix in (paired, plain)]
        for rows in (1, 7, 100):
            x = draw(rows, shape[1], dtype=dtype)
            found, expected = products[0](x), products[1](x)
            if own_sums and dtype is BF16:
                assert_near(found, expected.double(), product_error(x, unpacked(plain)), roundings=2)
            else:
                assert torch.equal(found, expected), (dtype, rows)


@pytest.mark.usefixtures("of_integers")
class TestProducts:
    """Right to the last integer, and each row a function of that row alone."""

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("type", MADE)
    def test_equals_fp64_and_no_row_depends_on_another(self, level: str, type: Type, shape: tuple[int, int]) -> None:
        dense = draw(*shape, seed=1)
        dense[0] *= 1e-6
        matrix, x = made(dense, type), draw(MAX_ROWS, shape[1], dtype=BF16)
        values = exact_int4(dense) if type is Type.I4 else unpacked(matrix)
        self.compare(matrix, values, x, level)

    @pytest.mark.parametrize("type", KEPT)
    def test_of_blocks(self, level: str, type: Type) -> None:
        cols = 704 if type in OWN else 768  # no whole number of the columns that share scales
        source = blocks_of(type, 72, cols)
        x = draw(MAX_ROWS, cols, dtype=BF16)
        self.compare(matrix_of(source, type, cols, paired=True), reference(source, type), x, level)

    def compare(self, matrix: PackedMatrix, values: Tensor, x: Tensor, level: str) -> None:
        product = Product(matrix, BF16)
        whole = product(x)
        # Codes and shifts are summed apart where there are shifts.
        error = product_error(x, values) + x.double().abs().sum(1, keepdim=True) * values.abs().amax() * 2.0**-20
        assert_near(whole, expected(x, values, matrix.type), error)
        for rows in ROWS:
            start = (rows * 13) % (MAX_ROWS - rows + 1)  # another place each time
            assert torch.equal(product(x[start : start + rows]), whole[start : start + rows]), rows
        with Threads(2):
            for rows in (1, 17, 33, MAX_ROWS):
                assert torch.equal(product(x[:rows]), whole[:rows]), rows

    @pytest.mark.parametrize("type", [*MADE, Type.Q8_0])
    def test_sums_of_the_largest_integers(self, type: Type) -> None:
        """Sums of products of one sign are within 32 bits: by little in bfloat16, whose numbers have but eight bits."""
        x = torch.full((9, 256), 255.0, dtype=BF16)
        if type in MADE:
            matrix = made(torch.full((17, 256), -255.0), type)
        else:
            blocks = torch.full((17, 8, 34), 0x80, dtype=torch.uint8)  # codes of -128
            blocks[..., :2] = torch.tensor([0.5], dtype=torch.float16).view(torch.uint8)
            matrix = matrix_of(blocks.view(17, -1), type, 256, paired=True)
        exact = x.double() @ unpacked(matrix).double().t()
        for rows in (1, 9):
            found = Product(matrix, BF16, out_dtype=torch.float32)(x[:rows])
            torch.testing.assert_close(found.double(), exact[:rows], rtol=1e-2 if type is Type.I4 else 1e-6, atol=0.0)

    def test_more_rows_than_share_a_panel(self) -> None:
        matrix, x = packed(draw(40, 300), Type.I4, paired=True), draw(1000, 300, dtype=BF16)
        product = Product(matrix, BF16)
        assert torch.equal(product(x), torch.cat([product(part) for part in x.split(130)]))

    @pytest.mark.parametrize(("type", "bound"), [(Type.BF16_INTS, 2e-4), (Type.I8, 3e-5)])
    def test_nothing_is_lost_beside_what_bfloat16_rounds(self, type: Type, bound: float) -> None:
        """Results in float32 are within 1/5000 of the numbers' own product, where bfloat16 rounds by 1/600."""
        dense, x = draw(64, 1024, dtype=BF16, seed=1), draw(40, 1024, dtype=BF16)
        matrix = made(dense, type)
        values = dense if type is Type.BF16_INTS else unpacked(matrix)
        exact = x.double() @ values.double().t()
        found = Product(matrix, BF16, out_dtype=torch.float32)(x)
        assert (found - exact).norm() / exact.norm() < bound

    @pytest.mark.parametrize("type", [Type.BF16_INTS])
    def test_a_large_neighbour_takes_nothing_from_other_groups(self, type: Type) -> None:
        """Activations have columns a thousand times as large as the rest: 63 others lose bits, or 31, and no more."""
        x, weight = torch.zeros(1, 96, dtype=BF16), torch.zeros(2, 96, dtype=BF16)
        x[0, 70], x[0, 1], x[0, 71] = 3000.0, 1.0 / 3, 1.0 / 3
        weight[:, 1], weight[:, 71], weight[1, 71] = 1.0, 0.0, 1.0
        found = Product(made(weight, type), BF16, out_dtype=torch.float32)(x)
        third = x[0, 1].item()
        assert found[0, 0] == third
        assert abs(found[0, 1] - 2 * third) <= 3000 * 2.0**-14

    @each({"type": [*MADE, Type.Q8_0, Type.Q4_K], "rows": [3, 16, 40]})
    def test_nan_and_infinity_stay_in_their_rows(self, level: str, type: Type, rows: int) -> None:
        if not in_pairs(level, type):
            return
        found = made(draw(50, 256), type) if type in MADE else None
        matrix = found or matrix_of(blocks_of(type, 50, 256), type, 256, paired=True)
        x = draw(rows, 256, dtype=BF16)
        product = Product(matrix, BF16)
        clean = product(x)
        x[1, 44], x[2, 0] = torch.nan, torch.inf
        found = product(x)
        others = [i for i in range(rows) if i not in (1, 2)]
        assert torch.equal(found[others], clean[others])
        assert found[1].isnan().all()
        assert not found[2].isfinite().any()

    @each({"broken": [torch.nan, torch.inf], "type": MADE, "rows": [1, 9]})
    def test_a_broken_weight_shows(self, level: str, type: Type, broken: float, rows: int) -> None:
        if not in_pairs(level, type):
            return
        dense = draw(20, 70)
        dense[3, 65] = broken
        found = Product(made(dense, type), BF16)(draw(rows, 70, dtype=BF16))
        assert not found[:, 3].isfinite().any()
        assert found[:, :3].isfinite().all()
        assert found[:, 4:].isfinite().all()

    @pytest.mark.parametrize("type", [Type.BF16_INTS])
    def test_numbers_at_the_ends_of_their_range(self, type: Type) -> None:
        weight = torch.full((5, 64), 1.0, dtype=BF16)
        for row, value in enumerate((0.0, 2.0**-126, 2.0**-60, 2.0**60, 3e38)):
            weight[row] = value
        x = torch.full((7, 64), 2.0**-60, dtype=BF16)
        x[1], x[2], x[3], x[4] = 0.0, -1.0, 2.0**-126, 2.0**60
        found = Product(made(weight, type), BF16, out_dtype=torch.float32)(x).double()
        exact = x.double() @ weight.double().t()
        largest = torch.finfo(torch.float32).max
        assert torch.equal(found.isinf(), exact.abs() > largest)
        near = exact.abs() <= largest
        # Two units whose product is no normal number make nothing.
        torch.testing.assert_close(found[near], exact[near], rtol=1e-6, atol=2.0**-113)

    @each({"function": Epilogue, "type": MADE})
    def test_bias_activation_and_residual(self, level: str, type: Type, function: Epilogue) -> None:
        if not in_pairs(level, type):
            return
        for features in (32, 96) if function in GATED else (45, 16):
            dense = draw(features, 70, seed=1) * 0.2
            matrix, bias = made(dense, type), draw(features, dtype=BF16, seed=2)
            plain = Product(matrix, BF16, bias=bias, out_dtype=torch.float32)
            for rows in (1, 5, 37):
                x = draw(rows, 70, dtype=BF16)
                wide = FUNCTIONS[function](plain(x).double())
                found = Product(matrix, BF16, bias=bias, function=function)(x)
                assert_near(found, wide, wide.abs() * 1e-5 + 1e-5)
                if function is Epilogue.NONE:
                    residual = draw(rows, features, dtype=BF16, seed=3)
                    both = Product(matrix, BF16, bias=bias, residual=True)(x, residual)
                    assert_near(both, wide + residual.double(), wide.abs() * 1e-6)

    def test_no_rows(self) -> None:
        product = Product(packed(draw(5, 8), Type.I4, paired=True), BF16)
        assert product(torch.empty(0, 8, dtype=BF16)).shape == (0, 5)


IN_BOTH_WAYS = """
import hashlib, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/../.."]
import torch
from native_cases import Product, draw
from test_native_pairs import KEPT, MADE, made, matrix_of, blocks_of
for type in (*MADE, *KEPT):
    for columns in (64, 288) if type in MADE else (256, 512):
        x = draw(70, columns, dtype=torch.bfloat16)
        x[0] *= 1e-38
        x[2, 5:7], x[3, 5] = torch.tensor([float("inf"), 3e38]), float("nan")
        if type in MADE:
            matrix = made(draw(48, columns, seed=1), type)
        else:
            matrix = matrix_of(blocks_of(type, 48, columns), type, columns, paired=True)
        for rows in (8, 9, 13, 70):
            bits = Product(matrix, torch.bfloat16)(x[:rows]).view(torch.int16)
            print(type, columns, rows, hashlib.sha1(bits.numpy().tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_pairs_added_at_once_and_one_after_the_other() -> None:
    """With AVX-VNNI and without: the same bits."""
    told = told_both_ways(IN_BOTH_WAYS, Path(__file__).parent, "QUIRE_VNNI", "avx2")
    assert len(told) == len(MADE + KEPT) * 8
