"""Products with quantized weights, and the codes that a program on a device finds two a byte.

The twin of what the native kernels do with their own packed matrices (`quire.ops.linear`). Knows no checkpoint.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.linear import linear
from quire.ops.table import op

GROUP = 32  # columns that share a scale where codes have four bits
_ROWS_AT_ONCE = 1024  # rows expanded at a time, so that the wide copies stay small


@op
def quantized_linear(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`linear` with weights of fewer bits: [M, K], [N, ...], fp32 [N, scales of a row], [N] -> [M, N].

    weight: int8 or float8_e4m3fn [N, K], multiplied as they are and each sum scaled; or uint8, `pack_int4`'s, each
        multiplied by its scale and rounded to bfloat16 first.
    """
    out = x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype)
    for low in range(0, weight.shape[0], _ROWS_AT_ONCE):
        rows = slice(low, low + _ROWS_AT_ONCE)
        if weight.dtype == torch.uint8:
            dense = expand_int4(weight[rows], scales[rows], x.shape[1])
            out[:, rows] = linear(x, dense.to(torch.bfloat16).to(x.dtype))
        else:  # eight bits are exact in bf16
            out[:, rows] = linear(x, weight[rows].to(x.dtype)).float() * scales[rows].t()
    return out if bias is None else out.add_(bias)


@op
def integer_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T``: int8 [M, K] x [N, K] -> float32 [M, N]; sums are exact, and rounded once if they need it."""
    return (x.double() @ weight.double().t()).float()


def pack_int4(codes: Tensor) -> Tensor:
    """Codes in -8..7, int8 [N, K] -> uint8 [N, 32 for each 64 columns], plus 8: of two the first in the low half."""
    padded = F.pad(codes + 8, (0, -codes.shape[1] % (2 * GROUP))).view(torch.uint8)
    return padded[:, ::2] | padded[:, 1::2] << 4


def unpack_int4(packed: Tensor) -> Tensor:
    """What `pack_int4` packed, plus 8, uint8, with the columns that it added."""
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)


def expand_int4(packed: Tensor, scales: Tensor, num_columns: int) -> Tensor:
    """The weights of `pack_int4`'s codes: [N, ...], [N, groups] -> float32 [N, num_columns]."""
    codes = unpack_int4(packed)[:, :num_columns].float() - 8.0
    return codes * scales.repeat_interleave(GROUP, dim=1)[:, :num_columns]
