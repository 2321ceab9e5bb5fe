"""A quantized checkpoint's own codes on a device without the native kernels' layout: integers and float8 by groups.

They come in blocks, as for those kernels (`quire.models.packings`). Here codes, scales and zeros are apart, as
`quire.ops.grouped_linear` takes them, and no matrix is ever dequantized in memory.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from quire import ops
from quire.ops.grouped import expand
from quire.ops.quantized import pack_int4
from quire.quantization.base import MatrixShape, QuantizationMethod, TensorForm

TYPES = ("U4_32", "U4_128", "U8_32", "U8_128", "F8_128")  # codes, and columns that share a scale
_CODES = {"U4": torch.uint8, "U8": torch.int8, "F8": torch.float8_e4m3fn}
PIECE = 32  # columns with one scale, at least, in the native kernels' own blocks
PIECE_BYTES = 40  # of which: a byte a code, the scale in float32, the zero, three unused
_ROWS_AT_ONCE = 1024  # rows taken apart at a time, so that the copies stay small


class Grouped(QuantizationMethod):
    """`codes` [out, in], two a byte if they have four bits, `scales` and `zeros` [out, groups], and maybe `bias` [out].

    Args:
        kind: of TYPES, as the native kernels call such blocks.
    """

    groups = True

    def __init__(self, kind: str) -> None:
        self._codes, self._span = _CODES[kind[:2]], int(kind[3:])

    def create_weights(self, shape: MatrixShape, dtype: torch.dtype, name: str = "") -> dict[str, Tensor]:
        rows, columns, num_groups = shape.out_features, shape.in_features, -(-shape.in_features // self._span)
        columns = -(-columns // 64) * 32 if self._codes == torch.uint8 else columns
        weights = {
            "codes": torch.empty(rows, columns, dtype=self._codes),
            "scales": torch.empty(rows, num_groups),
            "zeros": torch.empty(rows, num_groups, dtype=torch.int8),
        }
        return weights | ({"bias": torch.empty(rows, dtype=dtype)} if shape.bias else {})

    def checkpoint_tensors(self, shape: MatrixShape) -> dict[str, TensorForm]:
        rows, columns = shape.out_features, shape.in_features
        blocks = TensorForm((rows, columns // PIECE * PIECE_BYTES), (torch.uint8,), rows * columns)
        return super().checkpoint_tensors(shape) | {"weight": blocks}

    def load(self, weights: Mapping[str, Tensor], shape: MatrixShape, name: str, loaded: Tensor, start: int) -> None:
        if name == "bias":
            super().load(weights, shape, name, loaded, start)
            return
        pieces_of_group = self._span // PIECE
        for part in loaded.split(_ROWS_AT_ONCE):
            pieces = part.to(weights["codes"].device).unflatten(1, (-1, PIECE_BYTES))
            codes, ends = pieces[:, :, :PIECE].flatten(1), pieces[:, :, PIECE:].contiguous()
            codes = pack_int4(codes.view(torch.int8) - 8) if self._codes == torch.uint8 else codes.view(self._codes)
            scales = ends.view(torch.float32)[:, :, 0].split(pieces_of_group, dim=1)
            rows = slice(start, start := start + len(part))
            weights["codes"][rows] = codes
            # Pieces of a group have one scale, or NaN where codes are no numbers, which has to show.
            weights["scales"][rows] = torch.stack([each.amax(1) for each in scales], 1)
            weights["zeros"][rows] = ends.view(torch.int8)[:, ::pieces_of_group, 4]

    def apply(self, weights: Mapping[str, Tensor], shape: MatrixShape, x: Tensor, *, wide: bool = False) -> Tensor:
        codes, scales, zeros = (weights[name] for name in ("codes", "scales", "zeros"))
        return ops.grouped_linear(x, codes, scales, zeros, weights.get("bias"), torch.float32 if wide else None)

    def lookup(self, weights: Mapping[str, Tensor], shape: MatrixShape, ids: Tensor, dtype: torch.dtype) -> Tensor:
        codes, scales, zeros = (weights[name][ids] for name in ("codes", "scales", "zeros"))
        return expand(codes, scales, zeros, shape.in_features).to(dtype)
