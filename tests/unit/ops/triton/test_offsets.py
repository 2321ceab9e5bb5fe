"""Places beyond 2^31 elements: rows that lie 2^30 apart, in a file of holes of which a few pages are touched."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.ops.grouped import pack_int4
from quire.quantization.coded import quantize_int4, quantize_int8

APART = 2**30 + 16


def apart(rows: Tensor, path: Path) -> Tensor:
    """The same rows, APART elements from each other."""
    if rows.is_cuda:
        pytest.skip("holes are files'")
    flat = torch.from_file(str(path), shared=True, size=APART * (len(rows) - 1) + rows.shape[1], dtype=rows.dtype)
    result = flat.as_strided(rows.shape, (APART, 1))
    assert len(rows) * APART > 2**31
    return result.copy_(rows)


@pytest.mark.parametrize("kind", ["x", "weight", "int8", "int4"])
def test_products(installed: str, kind: str, tmp_path: Path) -> None:
    x, weight = torch.randn(4, 40).to(installed), torch.randn(4, 40).to(installed)
    if kind == "x":
        expected, found = ops.linear(x, weight), ops.linear(apart(x, tmp_path / "x"), weight)
    elif kind == "weight":
        expected, found = ops.linear(x, weight), ops.linear(x, apart(weight, tmp_path / "w"))
    else:
        codes, scales = quantize_int8(weight) if kind == "int8" else quantize_int4(weight)
        codes = codes if kind == "int8" else pack_int4(codes)
        expected = ops.quantized_linear(x, codes, scales)
        found = ops.quantized_linear(x, apart(codes, tmp_path / "w"), scales)
    assert torch.equal(found, expected)


def test_rows(installed: str, tmp_path: Path) -> None:
    x = torch.randn(4, 40).to(installed)
    far = apart(x, tmp_path / "x")
    assert torch.equal(ops.embedding(torch.tensor([3, 0, 2], dtype=torch.int32, device=installed), far), x[[3, 0, 2]])
    assert torch.equal(ops.silu_and_mul(far), ops.silu_and_mul(x))
