"""Products with a matrix of weights: the reference in plain torch, and the packed matrices of the native kernels."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.native.builder import Value
from quire.ops.native.matrix import PackedMatrix
from quire.ops.native.structs import TYPE_OF
from quire.ops.table import op

MIN_COLUMNS = 16  # of fewer some CPUs' libraries sum one row of a tile in another order than the next
ROW_TILE = 32  # rows of every matrix product: one shape, hence one order of summation
_ALIGNMENT = 64  # bytes; a GEMM may choose another path for rows that start elsewhere


@op
def linear(
    x: Tensor,
    weight: Tensor | PackedMatrix | Sequence[PackedMatrix],
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``x @ weight.T + bias``: [M, K], [N, K], [N] -> [M, N], in the dtype of `weight` or in `out_dtype`.

    Packed weights may be in several matrices, of one type each, whose rows follow each other.

    Each tile of ROW_TILE rows is one product; the last is padded with zero rows.
    """
    assert isinstance(weight, Tensor), "packed weights are multiplied by recorded programs only"
    num_rows, num_columns = x.shape[0], weight.shape[0]
    if num_columns < MIN_COLUMNS:
        weight = F.pad(weight, (0, 0, 0, MIN_COLUMNS - num_columns))
    out = x.new_empty(-(-num_rows // ROW_TILE) * ROW_TILE, weight.shape[0])
    x = x.contiguous()
    if x.data_ptr() % _ALIGNMENT:
        x = x.clone()
    transposed = weight.t()
    for start in range(0, num_rows, ROW_TILE):
        tile = x[start : start + ROW_TILE]
        if tile.shape[0] < ROW_TILE:
            tile = F.pad(tile, (0, 0, 0, ROW_TILE - tile.shape[0]))
        torch.mm(tile, transposed, out=out[start : start + ROW_TILE])
    out = out[:num_rows, :num_columns]
    out = out if bias is None else out.add_(bias)
    return out if out_dtype is None else out.to(out_dtype)


@linear.native
def _build(
    x: Value,
    weight: PackedMatrix | Sequence[PackedMatrix],
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Value:
    builder, first = x.builder, 0
    weight = [weight] if isinstance(weight, PackedMatrix) else weight
    out = Value(builder, sum(part.rows for part in weight), builder.type if out_dtype is None else TYPE_OF[out_dtype])
    for part in weight:
        if x.width != part.cols:
            raise ValueError(f"a matrix [{part.rows}, {part.cols}] can't multiply rows of {x.width}")
        told: dict[str, Any] = {"first": first} if first else {}
        if bias is not None:
            told["bias"] = cast(int, builder.vector(bias, out.width)) + first * bias.itemsize
        builder.append("linear", [x], out, weight=builder.matrix(part), **told)
        first += part.rows
    return out
