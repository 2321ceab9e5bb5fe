"""RMSNorm and LayerNorm, alone or of a sum that is stored, too: the kernel of `quire.ops.norm`.

A program takes so many whole rows as their width says. The order of a sum is that of the program's layout, which the
compiler makes from widths, warps and what it knows of alignment: all of them are the same for every number of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.common import aligned, begin_kernel, launch, narrow


@triton.jit(do_not_specialize=["num_rows"])
def _norm(
    x, residual, weight, bias, out, total, num_rows, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SUBTRACT_MEAN: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)[None, :]
    if weight is not None:
        factor = tl.load(weight + columns, columns < SIZE, other=0.0).to(tl.float32)
    begin_kernel()  # weights, which no kernel writes, are on their way
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = (rows < num_rows)[:, None] & (columns < SIZE)
    places = rows.to(tl.int64)[:, None] * SIZE + columns
    wide = tl.load(x + places, mask, other=0.0).to(tl.float32)
    if residual is not None:
        wide += tl.load(residual + places, mask, other=0.0).to(tl.float32)
        rounded = narrow(wide, total.dtype.element_ty)
        tl.store(total + places, rounded, mask)
        wide = rounded.to(tl.float32)
    if SUBTRACT_MEAN:
        wide -= tl.div_rn(tl.sum(wide, 1), SIZE * 1.0)[:, None]
        wide = tl.where(mask, wide, 0.0)
    variance = tl.div_rn(tl.sum(wide * wide, 1), SIZE * 1.0)
    wide = tl.div_rn(wide, tl.sqrt_rn(variance + eps)[:, None])
    if weight is not None:
        wide *= factor + 1.0 if PLUS_ONE else factor
    if bias is not None:
        wide += tl.load(bias + columns, columns < SIZE, other=0.0).to(tl.float32)
    tl.store(out + places, narrow(wide, out.dtype.element_ty), mask)


def _run(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    plus_one: bool = False,
    subtract_mean: bool = False,
) -> tuple[Tensor, Tensor]:
    """The norm of ``x + residual`` and that sum, or of `x` and that."""
    x, residual = aligned(x), None if residual is None else aligned(residual)
    out, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    size = x.shape[-1]
    num_rows, block = x.numel() // size, 1 << (size - 1).bit_length()
    rows = max(1, 1024 // block)
    launch(
        *(_norm, (-(-num_rows // rows),)),
        *(x, residual, weight, bias, out, total, num_rows, eps),
        SIZE=size,
        BLOCK=block,
        ROWS=rows,
        SUBTRACT_MEAN=subtract_mean,
        PLUS_ONE=plus_one,
        num_warps=min(max(block * rows // 512, 2), 16),
    )
    return out, total


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """As `quire.ops.rms_norm`."""
    return _run(x, None, weight, None, eps, plus_one)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    """As `quire.ops.add_rms_norm`."""
    return _run(x, residual, weight, None, eps, plus_one)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """As `quire.ops.layer_norm`."""
    return _run(x, None, weight, bias, eps, subtract_mean=True)[0]
