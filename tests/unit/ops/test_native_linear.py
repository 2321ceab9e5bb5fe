"""Products with packed matrices, on every level: right against fp64, and each row a function of that row alone."""

from pathlib import Path

import pytest
import torch
from both_ways import told_both_ways
from native_cases import (
    DENSE,
    DTYPES,
    EPSILON,
    FUNCTIONS,
    IN_BYTES,
    MAX_ROWS,
    ROWS,
    SHAPES,
    Product,
    Threads,
    as_multiplied,
    assert_near,
    draw,
    in_integers,
    of_values,
    packed,
    product_error,
)
from sweeping import each
from torch import Tensor
from unpacking import unpacked

from quire import ops
from quire.ops.native.builder import ProgramBuilder, recorded
from quire.ops.native.matrix import weight_order
from quire.ops.native.structs import GATED, Epilogue, Type
from quire.quantization.coded import quantize_int8, quantize_w4a8


@pytest.mark.sweep
@pytest.mark.pairs
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("type", DENSE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_fp64_and_no_row_depends_on_another(
    level: str, dtype: torch.dtype, type: Type, shape: tuple[int, int]
) -> None:
    matrix = packed(draw(*shape, seed=1), type)
    x = draw(MAX_ROWS, shape[1], dtype=dtype)
    product = Product(matrix, dtype)
    whole = product(x)
    dense = unpacked(matrix)
    taken = as_multiplied(x, type)
    assert_near(whole, taken.double() @ dense.double().t(), product_error(taken, dense))
    for rows in ROWS:
        start = (rows * 13) % (MAX_ROWS - rows + 1)  # another place each time
        assert torch.equal(product(x[start : start + rows]), whole[start : start + rows]), rows
    with Threads(2):
        for rows in (1, 17, 33, MAX_ROWS):
            assert torch.equal(product(x[:rows]), whole[:rows]), rows


IN_BOTH_WAYS = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
import torch
from native_cases import DENSE, Product, draw, packed
for type in DENSE:
    for columns in (64, 200):
        matrix, x = packed(draw(48, columns, seed=1), type), draw(70, columns, dtype=torch.bfloat16)
        x[0] *= 1e-38  # denormal numbers and small ones
        x[2, 5:7], x[3, 5] = torch.tensor([float("inf"), 3e38]), float("nan")
        for rows in (*range(1, 20), 33, 70):
            bits = Product(matrix, torch.bfloat16)(x[:rows]).view(torch.int16)
            print(type, columns, rows, hashlib.sha1(bits.numpy().tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_bf16_by_pairs_and_as_floats() -> None:
    """Whichever a CPU has done with first: the same bits."""
    assert len(told_both_ways(IN_BOTH_WAYS, Path(__file__).parent)) == len(DENSE) * 42


# With halves of 20 and 7 columns the activation is a kernel of its own: a gated product is cut in blocks of 16.
FUNCTION_SIZES = [(f, n) for f in Epilogue for n in ((32, 96, 40, 14) if f in GATED else (45,))]


@each({("function", "features"): FUNCTION_SIZES, "type": DENSE, "dtype": DTYPES})
def test_bias_activation_and_residual(
    level: str, dtype: torch.dtype, type: Type, function: Epilogue, features: int
) -> None:
    matrix, x = packed(draw(features, 70, seed=1) * 0.2, type), draw(37, 70, dtype=dtype)
    dense, bias = unpacked(matrix), draw(features, dtype=dtype, seed=2)
    taken = as_multiplied(x, type)
    error = product_error(taken, dense)
    expected = taken.double() @ dense.double().t() + bias.double()
    # Where kernels are not fused, what lies between them is rounded.
    fused = function not in GATED or features % 32 == 0
    error = error + (0 if fused else expected.abs() * EPSILON[dtype] if dtype == torch.bfloat16 else 0)
    if function in GATED:
        gate, up = expected.chunk(2, -1)
        up = up.abs() + (function is Epilogue.SWIGLU_OAI_MUL)  # by which that gate is multiplied at most
        error = 1.1 * (error.chunk(2, -1)[0] * up.abs() + error.chunk(2, -1)[1] * gate.abs()) + up.abs() * 1e-6
    else:
        error = 1.2 * error + 1e-6
    expected = FUNCTIONS[function](expected)
    assert_near(Product(matrix, dtype, bias=bias, function=function)(x), expected, error)

    residual = draw(37, expected.shape[1], dtype=dtype, seed=3)
    if function is Epilogue.NONE:
        found = Product(matrix, dtype, bias=bias, residual=True)(x, residual)
        assert_near(found, expected + residual.double(), error)
        wide = Product(matrix, dtype, bias=bias, out_dtype=torch.float32)(x)
        assert wide.dtype == torch.float32
        assert_near(wide, expected, error)
        assert torch.equal(wide.to(dtype), Product(matrix, dtype, bias=bias)(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 20, 40])
def test_rows_apart_from_each_other(level: str, dtype: torch.dtype, rows: int) -> None:
    """Rows of inputs and outputs may lie in wider ones; what is between them is not touched."""
    matrix = packed(draw(21, 50), Type.BF16)
    x, residual = draw(rows, 77, dtype=dtype)[:, 3:53], draw(rows, 64, dtype=dtype, seed=1)[:, 9:30]
    product = Product(matrix, dtype, residual=True)
    room = torch.full((rows, 40), 7.0, dtype=dtype)
    product.program.run([x, residual, room[:, 5:26]])
    assert torch.equal(room[:, 5:26], product(x, residual))
    assert (room[:, :5] == 7).all()
    assert (room[:, 26:] == 7).all()


@each({"type": DENSE, "threads": [2, 3, 7]})
def test_blocks_that_no_number_of_threads_divides(level: str, type: Type, threads: int) -> None:
    matrix, x = packed(draw(16 * 37 - 5, 64), type), draw(200, 64, dtype=torch.bfloat16)
    product = Product(matrix, torch.bfloat16)
    alone = product(x)
    with Threads(threads):
        assert torch.equal(product(x), alone)


@pytest.mark.pairs
@pytest.mark.parametrize("type", DENSE)
def test_many_long_rows_are_multiplied_some_at_a_time(level: str, type: Type) -> None:
    matrix, x = packed(draw(32, 16384), type), draw(450, 16384, dtype=torch.bfloat16)
    product = Product(matrix, x.dtype, residual=True)
    residual = draw(450, 32, dtype=x.dtype, seed=1)
    whole = product(x, residual)
    for start, end in ((0, 30), (140, 210), (300, 330), (449, 450)):
        assert torch.equal(product(x[start:end], residual[start:end]), whole[start:end]), start


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_output_may_be_the_residual(level: str, dtype: torch.dtype) -> None:
    matrix, x, residual = packed(draw(33, 40), Type.I8), draw(50, 40, dtype=dtype), draw(50, 33, dtype=dtype, seed=1)
    product = Product(matrix, dtype, residual=True)
    expected = product(x, residual)
    product.program.run([x, residual, residual])
    assert torch.equal(residual, expected)


@each({"type": DENSE})
def test_the_output_may_be_the_input(level: str, type: Type) -> None:
    """No thread reads a row then that another one has written."""
    matrix = packed(draw(320, 320), type)
    with Threads(3):
        product = Product(matrix, torch.bfloat16)
        for rows in (1, 4, 20):
            x = draw(rows, 320, dtype=torch.bfloat16)
            expected = product(x)
            product.program.run([x, x])
            assert torch.equal(x, expected), rows


@each({"type": DENSE, "dtype": DTYPES, "rows": [3, 16, 40]})
def test_nan_and_infinity_stay_in_their_rows(level: str, dtype: torch.dtype, type: Type, rows: int) -> None:
    matrix = packed(draw(50, 45), type)
    x = draw(rows, 45, dtype=dtype)
    product = Product(matrix, dtype)
    clean = product(x)
    x[1, 44], x[2, 0] = torch.nan, torch.inf
    found = product(x)
    others = [i for i in range(rows) if i not in (1, 2)]
    assert torch.equal(found[others], clean[others])
    assert found[1].isnan().all()
    assert not found[2].isfinite().any()
    if type in IN_BYTES:  # whose row has an infinite scale: infinite or no number
        return
    expected = (x[2].double() @ unpacked(matrix).double().t()).to(dtype)
    assert torch.equal(found[2].isinf() * found[2].sign(), expected.isinf() * expected.sign())


@each({"type": DENSE, "dtype": DTYPES})
def test_no_rows(level: str, dtype: torch.dtype, type: Type) -> None:
    assert Product(packed(draw(5, 8), type), dtype)(torch.empty(0, 8, dtype=dtype)).shape == (0, 5)


@pytest.mark.pairs
@pytest.mark.parametrize("type", DENSE)
@pytest.mark.parametrize("features", [5, 40, 700])
def test_threads_share_a_product_out(level: str, type: Type, features: int) -> None:
    """There may be more of them than blocks; who is done takes from others, and each copies a few rows of x itself."""
    x, matrix = draw(40, 3100, dtype=torch.bfloat16), packed(draw(features, 3100), type)
    whole = Product(matrix, x.dtype)(x)
    for num_threads in (2, 3, 5, 40):
        with Threads(num_threads):
            product = Product(matrix, x.dtype)
            for rows in (1, 4, 12, 24, 25, 40):
                assert torch.equal(product(x[:rows]), whole[:rows]), (num_threads, rows)


@pytest.mark.parametrize("type", IN_BYTES)
def test_products_of_integers_are_the_twins(level: str, type: Type) -> None:
    """Bit for bit, also in the level's own order, and of rows of the largest codes of either sign."""
    dense, x = draw(53, 2100), draw(130, 2100, dtype=torch.bfloat16, seed=1)
    dense[:17], dense[17:34], x[::3], x[1::3] = 3.0, -3.0, 5.0, -5.0
    dense[34:36, ::2], dense[34:36, 1::2], x[1::12, ::32], x[4::12, :1050] = 3.0, -3.0, 5.0, 5.0
    codes, scales = (quantize_w4a8 if type is Type.W4A8 else quantize_int8)(dense)
    assert codes.abs().amax() == (120 if type is Type.W4A8 else 127)
    integers, own_scales = in_integers(x, type)
    high = (integers + 128) >> 8 if type is Type.W8A16 else torch.zeros_like(integers)  # bytes have sums of their own
    sums = [(part.double() @ codes.double().t()).float() for part in (high, integers - 256 * high)]
    expected = (sums[0] * 256.0 + sums[1]) * own_scales * scales.t()
    for paired in {False, weight_order(level, type)[:2] == (type, True)}:
        product = Product(packed(dense, type, paired), torch.bfloat16, out_dtype=torch.float32)
        for rows in (*range(1, 26), 40, 96, 97, 130):
            assert torch.equal(product(x[:rows]), expected[:rows]), (paired, rows)


@pytest.mark.parametrize("rows", [1, 5, 20, 40])
def test_int4_weights_are_the_bfloat16_ones_that_unpack_tells(level: str, rows: int) -> None:
    """Bit for bit, with scales large and small: kernels expand int4 codes by other means than `unpack`."""
    matrix = packed(draw(300, 200) * 10.0 ** torch.linspace(-15, 15, 300)[:, None], Type.I4)
    x = draw(rows, 200, dtype=torch.bfloat16, seed=1)
    expected = Product(of_values(unpacked(matrix), Type.I4, level), torch.bfloat16)(x)
    assert expected.isfinite().all()
    assert expected.count_nonzero() > 0.9 * expected.numel()
    assert torch.equal(Product(matrix, torch.bfloat16)(x), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(33, 31), (199, 100), (40, 1000), (20, 3100)], ids=str)
def test_the_order_in_memory_changes_no_bit(level: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Numbers in the order in which a level multiplies them: the same results for any number of rows."""
    dense = draw(*shape)
    turned, plain = (Product(packed(dense, type), dtype) for type in (Type.BF16_TURNED, Type.BF16))
    for rows in (1, 2, 4, 5, 6, 7, 12, 13, 17, 32, 33, 97, 130):
        x = draw(rows, shape[1], dtype=dtype, seed=1)
        assert torch.equal(turned(x), plain(x)), rows


def test_magnitudes_far_apart(level: str) -> None:
    """Scales are per row (int8) or group of 32 (int4): a large row or group takes nothing from a small one."""
    weight = draw(40, 64)
    weight[::2] *= 1e-6
    weight[:, 32:] *= 1e3
    weight[5] = 0
    x = torch.eye(64)
    for type, bound in ((Type.F32, 1e-7), (Type.BF16, 2.0**-8), (Type.I8, 1 / 250), (Type.I4, 0.18)):
        found = Product(packed(weight, type), torch.float32)(x).t()
        size = weight.view(40, 2, 32) if type is Type.I4 else weight.view(40, 1, 64)
        error = (found - weight).view(size.shape).abs().amax(2) / size.abs().amax(2).clamp(min=1e-30)
        assert error.max() < bound, type
        assert not found[5].any()


def test_widths_must_agree(level: str) -> None:
    builder, matrix = ProgramBuilder(torch.float32), packed(draw(5, 8), Type.F32)
    with pytest.raises(ValueError, match=r"a matrix \[5, 8\] can't multiply rows of 9"):
        ops.linear(recorded(builder.input(9)), matrix, None)


@pytest.mark.parametrize("bias", [draw(6), draw(5).bfloat16(), draw(10)[::2]], ids=["size", "type", "stride"])
def test_a_bias_must_fit(level: str, bias: Tensor) -> None:
    builder, matrix = ProgramBuilder(torch.float32), packed(draw(5, 8), Type.F32)
    with pytest.raises(ValueError, match=r"expected 5 contiguous torch\.float32"):
        ops.linear(recorded(builder.input(8)), matrix, bias)
