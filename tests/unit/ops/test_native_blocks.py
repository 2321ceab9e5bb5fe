"""Weights in blocks: of GGUF files they are the `gguf` package's values, our own are those of a formula each.

Products are those of these values.
"""

import pytest
import torch
from native_cases import (
    DTYPES,
    MAX_ROWS,
    ROWS,
    Product,
    Threads,
    assert_near,
    at_page_end,
    draw,
    of_values,
    packed,
    product_error,
)
from sweeping import each
from torch import Tensor
from unpacking import unpacked

from quire.ops.native.library import Target
from quire.ops.native.matrix import PackedMatrix, row_bytes, weight_format
from quire.ops.native.structs import Type

gguf = pytest.importorskip("gguf")
np = pytest.importorskip("numpy")

OWN = [type for type in Type if type >= Type.U4_32]
BLOCKS = [type for type in Type if Type.Q4_0 <= type < Type.U4_32]
SHAPES = [(1, 256), (40, 512), (33, 768)]


CURVES = (  # NF4 (QLoRA, arXiv:2305.14314), FP4 as bitsandbytes has it, and e2m1
    "-1 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334 "
    "-0.09105003625154495 0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224 "
    "0.44070982933044434 0.5626170039176941 0.7229568362236023 1",
    "0 0.0052083333 0.66666667 1 0.33333333 0.5 0.16666667 0.25 -0 -0.0052083333 -0.66666667 -1 -0.33333333 -0.5 "
    "-0.16666667 -0.25",
    "0 0.5 1 1.5 2 3 4 6 -0 -0.5 -1 -1.5 -2 -3 -4 -6",
)


def own_blocks(type: Type, rows: int, cols: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Any codes, zeros and scales: uint8 [rows, bytes of a row], and the values, float32 [rows, cols]."""
    generator = torch.Generator().manual_seed(seed)
    span = 4 if type.name.endswith("_128") else 1
    codes = torch.randint(0, 16 if type.name[1] == "4" else 256, (rows, cols), generator=generator)
    groups = -(-cols // (32 * span))
    scales = torch.randn(rows, groups, generator=generator) * 0.01
    zeros = torch.randint(0, 3, (rows, groups), generator=generator)
    if type.name[0] == "U":
        zeros = zeros - 129 if type.name[1] == "8" else zeros * 8
        zeros = zeros.clamp(-128, 127)
    wide = [part.repeat_interleave(32 * span, 1)[:, :cols] for part in (scales, zeros)]
    if type.name[0] == "C":
        curves = torch.tensor([[float(number) for number in curve.split()] for curve in CURVES])
        numbers = curves[wide[1], codes]
    elif type.name[0] == "F":
        codes[codes % 128 == 127] = 0  # not a number
        numbers = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    else:
        signed = codes.to(torch.uint8).view(torch.int8).long() if type.name[1] == "8" else codes
        numbers = (signed - wide[1]).float()
    row = torch.zeros(rows, cols // 32, 40, dtype=torch.uint8)
    row[:, :, :32] = codes.to(torch.uint8).view(rows, -1, 32)
    row[:, :, 32:36] = wide[0][:, ::32].clone(memory_format=torch.contiguous_format).view(torch.uint8).view(rows, -1, 4)
    row[:, :, 36] = wide[1][:, ::32].to(torch.int8).view(torch.uint8)
    return row.flatten(1), numbers * wide[0]


def blocks_of(type: Type, rows: int, cols: int, seed: int = 0) -> Tensor:
    """Any bits for codes and scales, but numbers for the f16 that they are counted in. uint8 [rows, bytes of a row]."""
    if type in OWN:
        return own_blocks(type, rows, cols)[0]
    shape = weight_format(type)
    generator = np.random.default_rng(seed)
    found = generator.integers(0, 256, (rows, cols // shape.block_values, shape.block_bytes), dtype=np.uint8)
    places = {Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q6_K: (208,)}.get(type, (0,))
    if type in (Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K):
        places = (0, 2)
    for place in places:
        halves = (generator.standard_normal(found.shape[:2]) * 0.02).astype(np.float16)
        halves[generator.random(halves.shape) < 0.1] *= np.float16(2.0**-12)  # some are subnormal
        found[:, :, place : place + 2] = halves[:, :, None].view(np.uint8)
    return torch.from_numpy(found.reshape(rows, -1))


def reference(source: Tensor, type: Type) -> Tensor:
    if type in OWN:
        return own_blocks(type, source.shape[0], source.shape[1] // 40 * 32)[1]
    return torch.from_numpy(gguf.quants.dequantize(source.numpy(), gguf.GGMLQuantizationType[type.name]))


def matrix_of(source: Tensor, type: Type, cols: int, paired: bool = False) -> PackedMatrix:
    data = torch.zeros(PackedMatrix.data_shape(source.shape[0], cols, type), dtype=torch.uint8)
    matrix = PackedMatrix(at_page_end(data), None, source.shape[0], cols, type, paired)
    matrix.pack(at_page_end(source), 0)
    return matrix


@each({"shape": SHAPES, "type": BLOCKS})
def test_values_are_those_of_the_package(level: str, type: Type, shape: tuple[int, int]) -> None:
    """Bit for bit in float32; of the formats of 32 values also rows that are no superblocks."""
    sizes = weight_format(type)
    assert (sizes.block_values, sizes.block_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type.name]]
    rows, cols = shape
    cols -= 96 if sizes.block_values == 32 else 0
    source = blocks_of(type, rows, cols)
    assert torch.equal(unpacked(matrix_of(source, type, cols)), reference(source, type))


@each({"shape": [(1, 32), (40, 512), (33, 704)], "type": OWN})
def test_values_of_our_own_formats(level: str, type: Type, shape: tuple[int, int]) -> None:
    """Bit for bit in float32, also of rows that have scales of their last columns only."""
    source, values = own_blocks(type, *shape)
    assert torch.equal(unpacked(matrix_of(source, type, shape[1])), values)


@each({"type": BLOCKS})
def test_what_is_quantized_comes_out_near(level: str, type: Type) -> None:
    """Of the package's own quantizer, where it has one."""
    dense = draw(20, 512)
    try:
        source = gguf.quants.quantize(dense.numpy(), gguf.GGMLQuantizationType[type.name])
    except NotImplementedError:  # the package only reads it
        return
    error = (unpacked(matrix_of(torch.from_numpy(source), type, 512)) - dense).square().mean().sqrt()
    assert error < 0.12


@pytest.mark.slow
@pytest.mark.parametrize("type", BLOCKS + OWN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_the_values(level: str, dtype: torch.dtype, type: Type) -> None:
    """With bf16 activations bit for bit those with a matrix of bf16; float32 ones meet the values unrounded.

    A row is the same whatever the number of rows and of threads.
    """
    cols = 704 if type in OWN else 768  # no whole number of the columns that share scales
    source = blocks_of(type, 72, cols)
    matrix, x = matrix_of(source, type, cols), draw(MAX_ROWS, cols, dtype=dtype)
    product = Product(matrix, dtype)
    whole = product(x)
    dense = reference(source, type).to(dtype)
    assert_near(whole, x.double() @ dense.double().t(), product_error(x, dense))
    plain = of_values(dense, type, level) if dtype == torch.bfloat16 else packed(dense, Type.F32)
    assert torch.equal(whole, Product(plain, dtype)(x))
    for rows in ROWS if dtype == torch.bfloat16 else (1, 17, 64):
        start = (rows * 13) % (MAX_ROWS - rows + 1)
        assert torch.equal(product(x[start : start + rows]), whole[start : start + rows]), rows
    with Threads(2):
        for rows in (1, 17, 33, MAX_ROWS):
            assert torch.equal(product(x[:rows]), whole[:rows]), rows


@pytest.mark.parametrize("type", [Type.Q4_0, Type.IQ4_NL])
def test_any_scale_in_f16(level: str, type: Type) -> None:
    """What is finite gives the package's values; what is not, the same in a few rows as in many."""
    halves = np.random.default_rng(5).integers(0, 65536, (64, 8), dtype=np.uint16)
    halves[halves & 0x7C00 == 0x7C00] ^= 0x4000
    halves[0] = [0, 0x8000, 0x7C00, 0xFC00, 0x7E00, 1, 0x8001, 0x7BFF]
    source = blocks_of(type, 64, 256).clone().view(64, 8, 18)
    source[:, :, :2] = torch.from_numpy(halves[:, :, None].view(np.uint8))
    source = source.flatten(1)
    x, product = draw(40, 256, dtype=torch.bfloat16), Product(matrix_of(source, type, 256), torch.bfloat16)
    whole, dense = product(x), reference(source[1:], type).bfloat16()
    assert torch.equal(whole[:, 1:], Product(of_values(dense, type, level), torch.bfloat16)(x))
    for rows in (1, 2, 4, 5, 13):
        assert torch.equal(product(x[:rows]).nan_to_num(7), whole[:rows].nan_to_num(7)), rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("type", [Type.Q4_0, Type.Q8_0, Type.Q4_K])
def test_a_broken_scale_shows(level: str, type: Type, dtype: torch.dtype) -> None:
    """What is not a number may have any bits: rounding must not make a number of it."""
    source = blocks_of(type, 20, 256)
    for row, bits in ((1, 0x7FFF), (17, 0xFE00)):
        source[row, :2] = torch.tensor([bits & 255, bits >> 8], dtype=torch.uint8)
    broken = Product(matrix_of(source, type, 256), dtype)(draw(MAX_ROWS, 256, dtype=dtype)).isnan()
    assert broken[:, [1, 17]].all()
    assert broken.sum() == 2 * len(broken)


@each({"type": BLOCKS + OWN})
def test_parts_in_any_order(level: str, type: Type) -> None:
    """Rows of a merged layer begin within blocks of 16; every level makes the same bytes of them."""
    source = blocks_of(type, 50, 512)
    whole = matrix_of(source, type, 512)
    parts = PackedMatrix(torch.zeros_like(whole.data), None, 50, 512, type)
    for start, stop in ((21, 50), (0, 3), (3, 21)):
        parts.pack(source[start:stop], start, Target("portable", 2))
    assert torch.equal(parts.data, whole.data)


def test_misfits_are_refused(level: str) -> None:
    matrix = PackedMatrix(
        torch.zeros(PackedMatrix.data_shape(4, 256, Type.Q4_K), dtype=torch.uint8), None, 4, 256, Type.Q4_K
    )
    with pytest.raises(ValueError, match=r"can't be filled from \(1, 143\)"):
        matrix.pack(torch.zeros(1, 143, dtype=torch.uint8), 0)
    with pytest.raises(ValueError, match=r"Q4_K can't be made from torch.float32"):
        matrix.pack(torch.zeros(1, 144), 0)
    with pytest.raises(ValueError, match="rows of 320 weights aren't whole blocks of 256"):
        row_bytes(Type.Q4_K, 320)
    with pytest.raises(ValueError, match="BF16 can't be made from bytes"):
        row_bytes(Type.BF16, 320)
