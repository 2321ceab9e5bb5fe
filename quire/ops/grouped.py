"""Codes of weights whose columns share scales by groups, as a program on a device finds them: what they stand for.

On a CPU the native kernels' blocks are that (`quire.ops.linear`). Knows no checkpoint.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32  # columns that share a scale
WIDE = 128  # the other number of them where zeros are told


def pack_int4(codes: Tensor) -> Tensor:
    """Codes in -8..7, int8 [N, K] -> uint8 [N, 32 for each 64 columns], plus 8: of two the first in the low half."""
    padded = F.pad(codes + 8, (0, -codes.shape[1] % (2 * GROUP))).view(torch.uint8)
    return padded[:, ::2] | padded[:, 1::2] << 4


def expand(codes: Tensor, scales: Tensor, zeros: Tensor | None, num_columns: int) -> Tensor:
    """``(number of a code - zero) * scale``, float32 [N, num_columns].

    Args:
        codes: int8 or float8_e4m3fn [N, num_columns], or `pack_int4`'s.
        scales: float32 [N, 1 or groups].
        zeros: int8, likewise; None where all are 0, or of `pack_int4`'s codes 8.
    """
    is_packed = codes.dtype == torch.uint8
    zeros = torch.full_like(scales, 8.0 if is_packed else 0.0) if zeros is None else zeros.float()
    if is_packed:
        codes = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)[:, :num_columns]
    if scales.shape[1] > 1:  # else one for all columns
        groups = torch.arange(num_columns, device=codes.device) // group_size(scales, num_columns)
        scales, zeros = scales[:, groups], zeros[:, groups]
    return (codes.float() - zeros) * scales


def group_size(scales: Tensor, num_columns: int) -> int:
    """GROUP or WIDE: of which a row has so many scales."""
    return WIDE if scales.shape[1] == -(-num_columns // WIDE) else GROUP
