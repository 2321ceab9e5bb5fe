"""Products with a quantized checkpoint's own codes, whose columns share scales by groups, where they are kept as such.

On a CPU the native kernels' blocks are that (`quire.ops.linear`). Knows no checkpoint.
"""

import torch
from torch import Tensor

from quire.ops.linear import linear
from quire.ops.quantized import GROUP, unpack_int4
from quire.ops.table import op

WIDE = 128  # the other number of columns that may share a scale
_ROWS_AT_ONCE = 1024  # rows expanded at a time, so that the wide copies stay small


@op
def grouped_linear(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    """`linear` with the weights that `expand` makes, rounded to the type of `x`: [M, K], [N, ...] -> [M, N]."""
    out = x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype)
    for low in range(0, weight.shape[0], _ROWS_AT_ONCE):
        rows = slice(low, low + _ROWS_AT_ONCE)
        dense = expand(weight[rows], scales[rows], zeros[rows], x.shape[1]).to(x.dtype)
        out[:, rows] = linear(x, dense, None if bias is None else bias[rows])
    return out


def expand(codes: Tensor, scales: Tensor, zeros: Tensor, num_columns: int) -> Tensor:
    """``(number of a code - zero) * scale``, float32 [N, num_columns].

    Args:
        codes: int8 or float8_e4m3fn [N, num_columns], or uint8, `quire.ops.quantized.pack_int4`'s, plus 8.
        scales: float32 [N, groups].
        zeros: int8 [N, groups].
    """
    if codes.dtype == torch.uint8:
        codes = unpack_int4(codes)[:, :num_columns]
    groups = torch.arange(num_columns, device=codes.device) // group_size(scales, num_columns)
    return (codes.float() - zeros.float()[:, groups]) * scales[:, groups]


def group_size(scales: Tensor, num_columns: int) -> int:
    """GROUP or WIDE: of which a row has so many scales."""
    return WIDE if scales.shape[1] == -(-num_columns // WIDE) else GROUP
