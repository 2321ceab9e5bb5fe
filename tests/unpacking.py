"""What packed matrices hold, read back as the kernels multiply with it."""

import ctypes

import torch
from torch import Tensor

from quire.ops.native.library import default_target, loaded_library
from quire.ops.native.matrix import PackedMatrix


def unpacked(matrix: PackedMatrix) -> Tensor:
    """As float32 [rows, cols]."""
    out, struct = torch.empty(matrix.rows, matrix.cols), matrix.struct()
    kernels = default_target().kernels
    loaded_library().quire_unpack(kernels, ctypes.addressof(struct), 0, matrix.rows, out.data_ptr())
    return out
