"""Rows of a table: the kernel of `quire.ops.embedding`. As native programs do, it answers with zeros where none is."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.common import begin_kernel, launch

BLOCK = 1024  # columns of a program


@triton.jit
def _embedding(ids, table, out, num_rows, row_stride, size, BLOCK: tl.constexpr):
    begin_kernel()
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + place).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = tl.where((row >= 0) & (row < num_rows), size, 0)
    found = tl.load(table + row * row_stride + columns, columns < known, other=0.0)
    tl.store(out + place * size + columns, found, columns < size)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """As `quire.ops.embedding`; zeros for an id that the table has no row for."""
    size = table.shape[1]
    out = torch.empty(ids.shape[0], size, dtype=table.dtype, device=table.device)
    grid = (ids.shape[0], -(-size // BLOCK))
    launch(_embedding, grid, ids.contiguous(), table, out, table.shape[0], table.stride(0), size, BLOCK=BLOCK)
    return out
