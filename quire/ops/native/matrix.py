"""Packed weight matrices: the layout that the linear kernel reads, kept in plain byte tensors.

A weight format (`quire.quantization`) makes the tensors, fills them row by row as the checkpoint is read, and hands
them to a recorded program. What is in a tile is written in csrc/pack.h.
"""

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quire.ops.native.library import Target, default_target, levels, loaded_library
from quire.ops.native.structs import TYPE_OF, Type, c_struct

BLOCK_ROWS = 16
TILE_COLS = 32


@cache
def weight_order(level: str, type: Type) -> tuple[Type, bool, int]:
    """How a level likes best to have weights of this type where activations are bfloat16.

    Returns:
        As which type; whether in the order of pairs (csrc/pairs.h); how many bytes a product of numbers takes as long
        as (see `WeightOrder` in csrc/block_format.h).

    Raises:
        ConfigError: this CPU, or this library, has no such level.
    """
    found = c_struct("WeightOrder")()
    loaded_library().quire_weight_order(Target(level).kernels, type, ctypes.addressof(found))
    return Type(found.type), found.paired != 0, found.bytes


def orders_of(level: str) -> list[str]:
    """What tells files of a level's packed weights from those of others."""
    orders = {type: weight_order(level, type)[:2] for type in Type if level in levels()[:-1]}
    return [f"{type.name} {order}" for type, order in orders.items() if order != (type, False)]


@cache
def weight_format(type: Type) -> ctypes.Structure:
    """What a matrix of this type is made of: the fields of `WeightFormat` in csrc/block_format.h."""
    return c_struct("WeightFormat").from_address(loaded_library().quire_weight_format(type))


def row_bytes(type: Type, cols: int) -> int:
    """Bytes of a row of so many weights that are kept as a checkpoint has them (see `PackedMatrix.pack`).

    Raises:
        ValueError: they are no whole number of blocks, or the type is always made of floats.
    """
    if type is Type.W8A8:
        return cols + 4
    values = weight_format(type).block_values
    if not values:
        raise ValueError(f"{type.name} can't be made from bytes")
    if cols % values:
        raise ValueError(f"rows of {cols} weights aren't whole blocks of {values}")
    return cols // values * weight_format(type).block_bytes


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [rows, cols] of weights as the kernels want it.

    Attributes:
        data: uint8 [blocks of 16 rows, tiles of 32 columns, bytes of a tile], zeros where nothing was packed.
        scales: float32 [rows], where the type's format has some.
        paired: the order within tiles is that of csrc/pairs.h.
    """

    data: Tensor
    scales: Tensor | None
    rows: int
    cols: int
    type: Type
    paired: bool = False

    @staticmethod
    def data_shape(rows: int, cols: int, type: Type) -> tuple[int, int, int]:
        """Shape of `data`."""
        span = weight_format(type).span
        return -(-rows // BLOCK_ROWS), -(-cols // (span * TILE_COLS)) * span, weight_format(type).tile_bytes

    def __post_init__(self) -> None:
        expected = self.data_shape(self.rows, self.cols, self.type)
        if self.data.dtype != torch.uint8 or tuple(self.data.shape) != expected or not self.data.is_contiguous():
            got = f"{self.data.dtype} {tuple(self.data.shape)}"
            raise ValueError(f"data must be contiguous uint8 {expected}, got {got}")
        if (self.scales is not None) != weight_format(self.type).has_scales:
            raise ValueError(f"{self.type.name} {'needs' if self.scales is None else 'has no'} scales of its rows")
        if self.scales is not None and (self.scales.dtype != torch.float32 or self.scales.numel() != self.rows):
            raise ValueError(f"scales must be float32 [{self.rows}]")

    def struct(self) -> ctypes.Structure:
        """For a kernel call; holds no reference to the tensors."""
        data, scales = self.data.data_ptr(), None if self.scales is None else self.scales.data_ptr()
        sizes = {"rows": self.rows, "cols": self.cols}
        return c_struct("Matrix")(data=data, scales=scales, **sizes, type=self.type, paired=self.paired)

    def pack(self, source: Tensor, start: int, target: Target | None = None) -> None:
        """Fill the rows from `start` on with those of `source`, [n, cols] of any float type, quantized by the type.

        From uint8 [n, bytes of a row] they are kept as they are: blocks as a GGUF file has them, or for Type.W8A8 the
        codes plus 128, and the scale in float32.
        The bytes are the same whatever the `target` (default: `default_target`).
        """
        ready = source.dtype == torch.uint8
        if not ready and weight_format(self.type).block_values:
            raise ValueError(f"{self.type.name} can't be made from {source.dtype}")
        width = row_bytes(self.type, self.cols) if ready else self.cols
        if source.dim() != 2 or source.shape[1] != width or start < 0 or start + source.shape[0] > self.rows:
            raise ValueError(f"rows {start}.. of [{self.rows}, {self.cols}] can't be filled from {tuple(source.shape)}")
        if not ready and source.dtype not in (torch.float32, torch.bfloat16):
            source = source.float()
        if source.stride(1) != 1:
            source = source.contiguous()
        arguments = c_struct("PackArgs")(
            matrix=self.struct(),
            source=source.data_ptr(),
            source_stride=source.stride(0),
            start=start,
            num_rows=source.shape[0],
            source_type=self.type if ready else TYPE_OF[source.dtype],
        )
        target = target or default_target()
        loaded_library().quire_pack(target.kernels, target.num_threads, ctypes.addressof(arguments))
