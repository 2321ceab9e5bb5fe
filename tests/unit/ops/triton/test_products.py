"""Products: each kernel against its reference, and each row a function of that row alone, whatever the tiles."""

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.ops.activation import Activation
from quire.ops.grouped import expand, pack_int4
from quire.quantization.coded import quantize_fp8, quantize_int4, quantize_int8

DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
NUM_ROWS = (1, 2, 17, 64, 65, 130)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantized(kind: str, dense: Tensor) -> tuple[Tensor, Tensor]:
    if kind == "int4":
        codes, scales = quantize_int4(dense)
        return pack_int4(codes), scales
    return {"int8": quantize_int8, "fp8": quantize_fp8}[kind](dense)


def assert_near(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    """Within a rounding of the reference, which rounds up to three times, and of the sum's last bits."""
    bound = 3 * ROUNDING[dtype]
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_columns", "size"),
    [(1, 1), (33, 100), *(pytest.param(*large, marks=pytest.mark.slow) for large in ((200, 136), (97, 64)))],
)
def test_linear(installed: str, dtype: torch.dtype, num_columns: int, size: int) -> None:
    x, weight = draw(130, size, dtype=dtype), draw(num_columns, size, dtype=dtype, seed=1) * size**-0.5
    x, weight, bias = x.to(installed), weight.to(installed), draw(num_columns, dtype=dtype, seed=2).to(installed)
    whole = ops.linear(x, weight, bias)
    assert whole.dtype == dtype
    assert_near(whole, ops.linear.reference(x, weight, bias), dtype)
    for num_rows in NUM_ROWS:
        assert torch.equal(ops.linear(x[130 - num_rows :], weight, bias), whole[130 - num_rows :]), num_rows
    wide = ops.linear(x[:3], weight, None, torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.to(dtype), ops.linear(x[:3], weight))
    assert ops.linear(x[:0], weight).shape == (0, num_columns)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize(("num_columns", "size"), [(33, 70), (7, 33), pytest.param(70, 256, marks=pytest.mark.slow)])
def test_quantized(installed: str, kind: str, dtype: torch.dtype, num_columns: int, size: int) -> None:
    x, dense = draw(130, size, dtype=dtype).to(installed), draw(num_columns, size, seed=1) * size**-0.5
    weight, scales = (part.to(installed) for part in quantized(kind, dense))
    bias = draw(num_columns, dtype=dtype, seed=2).to(installed)
    whole = ops.quantized_linear(x, weight, scales, bias)
    assert whole.dtype == dtype
    assert_near(whole, ops.quantized_linear.reference(x, weight, scales, bias), dtype)
    for num_rows in NUM_ROWS:
        part = ops.quantized_linear(x[130 - num_rows :], weight, scales, bias)
        assert torch.equal(part, whole[130 - num_rows :]), num_rows
    assert ops.quantized_linear(x[:2], weight, scales, None, torch.float32).dtype == torch.float32


def grouped(kind: str, num_columns: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros, of all values that there can be."""
    generator = torch.Generator().manual_seed(size)
    group = int(kind[3:])
    shape = (num_columns, -(-size // group))
    scales = torch.randn(shape, generator=generator) * 0.01
    codes = torch.randint(256, (num_columns, size), generator=generator).to(torch.uint8)
    zeros = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
    if kind.startswith("U4"):
        return pack_int4((codes & 15).to(torch.int8) - 8), scales, zeros & 15
    if kind.startswith("U8"):
        return codes.view(torch.int8), scales, zeros
    return codes.where(codes & 127 != 127, 0).view(torch.float8_e4m3fn), scales, torch.zeros_like(zeros)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["U4_32", "U4_128", "U8_32", "U8_128", "F8_128"])
@pytest.mark.parametrize(
    ("num_columns", "size"),
    [
        *((33, 32), (1, 160)),
        *(pytest.param(*large, marks=pytest.mark.slow) for large in ((7, 96), (70, 256), (200, 288), (16, 544))),
    ],
)
def test_grouped(installed: str, kind: str, dtype: torch.dtype, num_columns: int, size: int) -> None:
    """Products with a checkpoint's own codes are, to the last bit, those with what they stand for."""
    codes, scales, zeros = (part.to(installed) for part in grouped(kind, num_columns, size))
    x, bias = draw(200, size, dtype=dtype).to(installed), draw(num_columns, dtype=dtype, seed=2).to(installed)
    dense = expand(codes, scales, zeros, size).to(dtype)
    whole = ops.quantized_linear(x, codes, scales, bias, zeros=zeros)
    assert torch.equal(whole, ops.linear(x, dense, bias))
    assert_near(whole, ops.quantized_linear.reference(x, codes, scales, bias, zeros=zeros), dtype)
    for num_rows in (1, 3, 16, 17, 65):
        part = ops.quantized_linear(x[200 - num_rows :], codes, scales, bias, zeros=zeros)
        assert torch.equal(part, whole[200 - num_rows :])
    wide = ops.quantized_linear(x[:3], codes, scales, None, torch.float32, zeros)
    assert torch.equal(wide, ops.linear(x[:3], dense, None, torch.float32))


@pytest.mark.parametrize(
    ("kind", "dtype", "gate"),
    [
        ("plain", torch.bfloat16, ops.silu_and_mul),
        ("plain", torch.float32, ops.gelu_and_mul),
        pytest.param("int4", torch.bfloat16, ops.swiglu_oai, marks=pytest.mark.slow),
        ("int4", torch.bfloat16, ops.gelu_tanh_and_mul),
        pytest.param("plain", torch.float16, ops.gelu_tanh_and_mul, marks=pytest.mark.slow),
        pytest.param("int8", torch.bfloat16, ops.gelu_and_mul, marks=pytest.mark.slow),
        pytest.param("U4_32", torch.bfloat16, ops.silu_and_mul, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("num_columns", "size"), [(66, 72), pytest.param(2, 136, marks=pytest.mark.slow)])
def test_a_gated_product(
    installed: str, num_columns: int, size: int, kind: str, dtype: torch.dtype, gate: Activation
) -> None:
    """In one kernel it is, to the last bit, what the product and its activation are one after the other."""
    x, dense = draw(70, size, dtype=dtype).to(installed), draw(num_columns, size, seed=1) * size**-0.5
    bias = draw(num_columns, dtype=dtype, seed=2).to(installed) if size < 100 else None
    if kind == "plain":
        operands = [dense.to(dtype).to(installed), bias]
        product = ops.linear(x, *operands)
    else:
        weight, *others = grouped(kind, num_columns, size) if kind == "U4_32" else quantized(kind, dense)
        operands = [weight.to(installed), bias, *(part.to(installed) for part in others)]
        product = ops.quantized_linear(x, operands[0], operands[2], bias, None, *operands[3:])
    whole = gate(product)
    assert whole.shape == (70, num_columns // 2)
    for num_rows in (0, 1, 17, 64, 65):
        part = ops.gated_linear(x[70 - num_rows :], gate, *operands)
        assert part.dtype == dtype
        assert torch.equal(part, whole[70 - num_rows :]), num_rows


def test_four_bits_made_here_are_multiplied_like_numbers(installed: str) -> None:
    x, (codes, scales) = draw(20, 200, dtype=torch.bfloat16).to(installed), quantized("int4", draw(33, 200, seed=1))
    dense = expand(codes, scales, torch.full_like(scales, 8, dtype=torch.int8), 200).to(torch.bfloat16)
    found = ops.quantized_linear(x, codes.to(installed), scales.to(installed))
    assert torch.equal(found, ops.linear(x, dense.to(installed)))


def test_integers(installed: str) -> None:
    for num_columns, size in ((33, 70), (70, 256)):
        x, weight = (draw(n, size, seed=n) * 40 for n in (130, num_columns))
        x, weight = (part.round().clamp(-127, 127).to(torch.int8).to(installed) for part in (x, weight))
        for num_rows in NUM_ROWS:
            expected = x[:num_rows].double() @ weight.double().t()
            assert torch.equal(ops.integer_linear(x[:num_rows], weight), expected.float())


def test_rows_that_lie_apart(installed: str) -> None:
    x, weight = draw(5, 300).to(installed), draw(20, 64, seed=1).to(installed)
    assert torch.equal(ops.linear(x[:, 100:164], weight), ops.linear(x[:, 100:164].clone(), weight))
    assert torch.equal(ops.linear(x.t()[:64].t(), weight), ops.linear(x[:, :64].clone(), weight))


@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_a_nan_or_infinity_stays_in_its_row(installed: str, num_rows: int) -> None:
    x, weight = draw(num_rows, 40).to(installed), draw(20, 40, seed=1).to(installed)
    x[0, 3] = torch.nan
    out = ops.linear(x, weight)
    assert out[0].isnan().all()
    assert not out[1:].isnan().any()
