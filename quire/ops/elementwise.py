"""What is done to each number of activations: sums, factors, bounds; and how references go through rows of them.

`x + y` and `x * factor` are the same as `add` and `scale`.
"""

from collections.abc import Callable

from torch import Tensor

from quire.ops.native.builder import Value
from quire.ops.table import op

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


@op
def add(x: Tensor, y: Tensor) -> Tensor:
    """``x + y``: [M, N] each."""
    return x + y


add.native(add.reference)  # which a builder's values record themselves


@op
def scale(x: Tensor, factor: float) -> Tensor:
    """``x * factor``, in fp32, rounded once; a factor that is to be rounded to the model's type comes rounded."""
    return x * factor


scale.native(scale.reference)  # likewise


@op
def softcap(x: Tensor, cap: float) -> Tensor:
    """Numbers kept within bounds, smoothly: ``cap * tanh(x / cap)``, in fp32, rounded once.

    Of logits here, of attention's scores within `paged_attention`.
    """
    return in_blocks(lambda rows: (rows.float() / cap).tanh_().mul_(cap), x.shape[-1], x)


@softcap.native
def _build(x: Value, cap: float) -> Value:
    return x.builder.append("softcap", [x], x.width, type=x.type, size=x.width, cap=cap)
