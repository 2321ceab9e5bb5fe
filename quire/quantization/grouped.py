"""A quantized checkpoint's own codes, taken out of the blocks that they come in.

The blocks are those of the native kernels (`quire.models.packings`). Elsewhere codes, scales and zeros are apart
(`quire.quantization.coded`), and no matrix is ever dequantized in memory.
"""

import torch
from torch import Tensor

from quire.quantization.base import MatrixShape, TensorForm

# The type of codes, of which uint8 has two a byte, and columns that share a scale; as the native kernels call them.
KEPT = {
    "U4_32": (torch.uint8, 32),
    "U4_128": (torch.uint8, 128),
    "U8_32": (torch.int8, 32),
    "U8_128": (torch.int8, 128),
    "F8_128": (torch.float8_e4m3fn, 128),
}
PIECE = 32  # columns with one scale, at least, in the native kernels' own blocks
PIECE_BYTES = 40  # of which: a byte a code, the scale in float32, the zero, three unused


def form_of_blocks(shape: MatrixShape) -> TensorForm:
    """A matrix of them in a checkpoint."""
    rows, columns = shape.out_features, shape.in_features
    return TensorForm((rows, columns // PIECE * PIECE_BYTES), (torch.uint8,), rows * columns)


def take_apart(blocks: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of blocks, uint8 [N, bytes] -> codes [N, K], scales float32 and zeros int8, both [N, groups].

    Codes of four bits come less 8, as int8.
    """
    dtype, span = KEPT[kind]
    pieces = blocks.unflatten(1, (-1, PIECE_BYTES))
    codes, ends = pieces[:, :, :PIECE].flatten(1), pieces[:, :, PIECE:].contiguous()
    codes = codes.view(torch.int8) - 8 if dtype == torch.uint8 else codes.view(dtype)
    scales = ends.view(torch.float32)[:, :, 0].split(span // PIECE, dim=1)
    # Pieces of a group have one scale, or NaN where codes are no numbers, which has to show.
    scales = torch.stack([each.amax(1) for each in scales], 1)
    return codes, scales, ends.view(torch.int8)[:, :: span // PIECE, 4]
