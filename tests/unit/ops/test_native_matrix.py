"""Packed matrices: what was packed comes out again, equal to what the plain-torch formats keep; misfits are refused."""

import pytest
import torch
from native_cases import DENSE, SHAPES, Threads, at_page_end, draw, packed
from sweeping import each
from torch import Tensor
from unpacking import unpacked

from quire.ops.native.library import Target
from quire.ops.native.matrix import PackedMatrix, weight_format
from quire.ops.native.structs import Type
from quire.quantization.coded import quantize_int4, quantize_int8, quantize_w4a8

SOURCES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def empty(rows: int, cols: int, type: Type) -> PackedMatrix:
    data = torch.zeros(PackedMatrix.data_shape(rows, cols, type), dtype=torch.uint8)
    return PackedMatrix(data, torch.zeros(rows) if weight_format(type).has_scales else None, rows, cols, type)


def expanded(codes: Tensor, scales: Tensor) -> Tensor:
    """int4 codes and scales of the twin -> weights, rounded as the kernels round them."""
    return (codes * scales.repeat_interleave(32, 1)[:, : codes.shape[1]]).bfloat16().float()


@each({"shape": SHAPES, "source": SOURCES})
def test_what_comes_out_is_what_the_twins_keep(level: str, source: torch.dtype, shape: tuple[int, int]) -> None:
    dense = at_page_end(draw(*shape, dtype=source) * 0.1)
    assert torch.equal(unpacked(packed(dense, Type.F32)), dense.float())
    for type in (Type.BF16, Type.BF16_TURNED):
        assert torch.equal(unpacked(packed(dense, type)), dense.bfloat16().float())
    codes, scales = quantize_int8(dense.float())
    for type in (Type.I8, Type.W8A16):
        assert torch.equal(unpacked(packed(dense, type)), codes * scales)
    assert torch.equal(unpacked(packed(dense, Type.W8A8)), codes * scales)
    assert torch.equal(unpacked(packed(dense, Type.I4)), expanded(*quantize_int4(dense.float())))
    codes, scales = quantize_w4a8(dense.float())
    assert torch.equal(unpacked(packed(dense, Type.W4A8)), codes * scales)


def test_rows_of_a_checkpoint_are_kept_as_they_are(level: str) -> None:
    """Codes of all 256 values and the scales, also where rows begin inside a block and end inside a tile."""
    codes = torch.randint(-128, 128, (37, 70), generator=torch.Generator().manual_seed(3), dtype=torch.int8)
    scales = draw(37, 1).abs()
    rows = torch.cat([codes.view(torch.uint8) ^ 128, scales.view(torch.uint8).view(37, 4)], dim=1)
    matrix = empty(37, 70, Type.W8A8)
    for start, stop in ((5, 37), (0, 5)):
        matrix.pack(rows[start:stop], start)
    assert torch.equal(unpacked(matrix), codes * scales)
    with pytest.raises(ValueError, match="I4 can't be made from bytes"):
        empty(37, 70, Type.I4).pack(rows, 0)


def test_quantization_is_as_good_as_its_bits(level: str) -> None:
    dense = draw(64, 256)
    for type, bound in ((Type.I8, 0.008), (Type.I4, 0.1), (Type.W4A8, 0.1)):
        error = (unpacked(packed(dense, type)) - dense).square().mean().sqrt()
        assert bound / 3 < error < bound


@pytest.mark.parametrize("type", DENSE)
def test_parts_in_any_order_and_layout(level: str, type: Type) -> None:
    """A merged layer is filled part by part; parts begin inside blocks of 16 rows, where int4 rows share words."""
    dense = draw(75, 70)
    expected = packed(dense, type)
    wide = torch.zeros(75, 140)
    wide[:, ::2] = dense
    sources = {"rows apart": wide[:, ::2], "transposed": dense.t().contiguous().t(), "part of a row": None}
    apart = torch.zeros(75, 100)
    apart[:, 7:77] = dense
    sources["part of a row"] = apart[:, 7:77]
    for name, source in sources.items():
        for num_threads in (1, 2):
            matrix = empty(75, 70, type)
            with Threads(num_threads):
                for start, stop in ((50, 75), (3, 18), (0, 3), (18, 19), (19, 50), (20, 20)):
                    matrix.pack(source[start:stop], start)
            assert torch.equal(matrix.data, expected.data), name
            assert matrix.scales is None or torch.equal(matrix.scales, expected.scales), name


@pytest.mark.parametrize("type", DENSE)
def test_every_level_packs_alike(level: str, type: Type) -> None:
    """A file of packed weights is good for every level."""
    dense = draw(40, 100)
    if type in (Type.I4, Type.W4A8):  # many groups in which two scales are equally good but for the order of summation
        dense = torch.randint(-20, 21, (20_000, 320), generator=torch.Generator().manual_seed(0)) * 0.1
    here = packed(dense, type)
    there = empty(*dense.shape, type)
    there.pack(dense, 0, Target("portable"))
    assert torch.equal(unpacked(here), unpacked(there))
    assert torch.equal(here.data, there.data)


@pytest.mark.parametrize("type", [Type.I8, Type.I4, Type.W4A8])
def test_rows_of_zeros_and_ends_of_the_range(level: str, type: Type) -> None:
    dense = torch.zeros(4, 64)
    dense[1, 0], dense[1, 32], dense[2, 5], dense[2, 33], dense[3] = 3.0, -3.0, 1e-12, -1e12, 1.0
    found = unpacked(packed(dense, type))
    assert not found[0].any()
    assert found.isfinite().all()
    torch.testing.assert_close(found[1], dense[1], rtol=0.01, atol=0)
    torch.testing.assert_close(found[3], dense[3], rtol=0.01, atol=0)
    assert found[2, 33] == pytest.approx(-1e12, rel=0.01)
    # In int4 the small one is in another group than the large one.
    assert found[2, 5] == (pytest.approx(1e-12, rel=0.01) if type is Type.I4 else 0)


@each({"type": DENSE, "broken": [torch.nan, torch.inf, -torch.inf], "place": [0, 5, 38]})
def test_a_broken_weight_shows(level: str, type: Type, broken: float, place: int) -> None:
    dense = draw(3, 40)
    dense[1, place] = broken
    found = unpacked(packed(dense, type))
    assert found[[0, 2]].isfinite().all()
    assert not found[1, place].isfinite()
    twins = {Type.I8: quantize_int8, Type.I4: quantize_int4, Type.W4A8: quantize_w4a8}
    if type in twins:
        codes, scales = twins[type](dense)
        twin = expanded(codes, scales) if type is Type.I4 else codes * scales
        assert torch.equal(twin.isfinite(), found.isfinite())


DATA = torch.zeros(1, 2, 512, dtype=torch.uint8)  # of an int8 matrix [5, 40]


@pytest.mark.parametrize(
    ("data", "scales", "message"),
    [
        (DATA[:, :1], torch.zeros(5), r"data must be contiguous uint8 \(1, 2, 512\), got torch.uint8 \(1, 1, 512\)"),
        (DATA.view(torch.int8), torch.zeros(5), r"data must be contiguous uint8 .* got torch.int8"),
        (DATA.repeat(1, 1, 2)[:, :, ::2], torch.zeros(5), "data must be contiguous"),
        (DATA, None, "I8 needs scales"),
        (DATA, torch.zeros(4), r"scales must be float32 \[5\]"),
        (DATA, torch.zeros(5, dtype=torch.bfloat16), r"scales must be float32 \[5\]"),
    ],
)
def test_a_matrix_is_checked(level: str, data: Tensor, scales: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedMatrix(data, scales, 5, 40, Type.I8)
    with pytest.raises(ValueError, match="BF16 has no scales"):
        PackedMatrix(torch.zeros(1, 2, 1024, dtype=torch.uint8), torch.zeros(5), 5, 40, Type.BF16)


@pytest.mark.parametrize(
    ("shape", "start"), [((40,), 0), ((1, 39), 0), ((1, 41), 0), ((1, 40), -1), ((2, 40), 4), ((6, 40), 0)]
)
def test_rows_that_do_not_fit_are_refused(level: str, shape: tuple[int, ...], start: int) -> None:
    with pytest.raises(ValueError, match=r"rows .*\.\. of \[5, 40\] can't be filled from"):
        empty(5, 40, Type.F32).pack(torch.zeros(shape), start)
