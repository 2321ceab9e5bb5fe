"""Rows of an element-wise reference, a block at a time. Used by the operations beside it; knows none of them."""

from collections.abc import Callable

from torch import Tensor

BLOCK_ROWS = 64  # rows of an element-wise operation at a time: its fp32 intermediates then stay in cache of a CPU


def in_blocks(function: Callable[..., Tensor], size: int, x: Tensor, *others: Tensor) -> Tensor:
    """``function(x, *others)``, a block of rows at a time, in the dtype of `x`; its last dimension is `size`."""
    if x.shape[0] <= BLOCK_ROWS or not x.is_cpu:
        return function(x, *others).to(x.dtype)
    out = x.new_empty((*x.shape[:-1], size))
    for start in range(0, x.shape[0], BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        out[rows] = function(x[rows], *(other[rows] for other in others))
    return out
