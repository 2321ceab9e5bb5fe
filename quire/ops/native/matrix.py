"""Packed weight matrices: the layout that the linear kernel reads, kept in plain byte tensors.

A weight format (`quire.quantization`) makes the tensors, fills them row by row as the checkpoint is read, and hands
them to a recorded program. What is in a tile is written in csrc/pack.h.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops.native.library import Target, default_target, loaded_library
from quire.ops.native.structs import TYPE_OF, Type, c_struct

BLOCK_ROWS = 16
TILE_COLS = 32
_TILE_BYTES = {Type.F32: 2048, Type.BF16: 1024, Type.I8: 512, Type.I4: 288}


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [rows, cols] of weights as the kernels want it.

    Attributes:
        data: uint8 [blocks of 16 rows, tiles of 32 columns, bytes of a tile], zeros where nothing was packed.
        scales: float32 [rows], of Type.I8 only.
    """

    data: Tensor
    scales: Tensor | None
    rows: int
    cols: int
    type: Type

    @staticmethod
    def data_shape(rows: int, cols: int, type: Type) -> tuple[int, int, int]:
        """Shape of `data`."""
        return -(-rows // BLOCK_ROWS), -(-cols // TILE_COLS), _TILE_BYTES[type]

    def __post_init__(self) -> None:
        expected = self.data_shape(self.rows, self.cols, self.type)
        if self.data.dtype != torch.uint8 or tuple(self.data.shape) != expected or not self.data.is_contiguous():
            raise ValueError(
                f"data must be contiguous uint8 {expected}, got {self.data.dtype} {tuple(self.data.shape)}"
            )
        if (self.scales is None) == (self.type is Type.I8):
            raise ValueError("scales belong to Type.I8, and to it only")
        if self.scales is not None and (self.scales.dtype != torch.float32 or self.scales.numel() != self.rows):
            raise ValueError(f"scales must be float32 [{self.rows}]")

    def struct(self) -> ctypes.Structure:
        """For a kernel call; holds no reference to the tensors."""
        scales = None if self.scales is None else self.scales.data_ptr()
        return c_struct("Matrix")(
            data=self.data.data_ptr(), scales=scales, rows=self.rows, cols=self.cols, type=self.type
        )

    def pack(self, source: Tensor, start: int, target: Target | None = None) -> None:
        """Fill the rows from `start` on with those of `source`, [n, cols] of any float type, quantized by the type.

        The bytes are the same whatever the `target` (default: `default_target`).
        """
        if source.dim() != 2 or source.shape[1] != self.cols or start < 0 or start + source.shape[0] > self.rows:
            raise ValueError(f"rows {start}.. of [{self.rows}, {self.cols}] can't be filled from {tuple(source.shape)}")
        if source.dtype not in (torch.float32, torch.bfloat16):
            source = source.float()
        if source.stride(1) != 1:
            source = source.contiguous()
        arguments = c_struct("PackArgs")(
            matrix=self.struct(),
            source=source.data_ptr(),
            source_stride=source.stride(0),
            start=start,
            num_rows=source.shape[0],
            source_type=TYPE_OF[source.dtype],
        )
        target = target or default_target()
        loaded_library().quire_pack(target.kernels, target.num_threads, ctypes.addressof(arguments))
