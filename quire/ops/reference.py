"""Plain-torch twins of the kernels: what each operation means, bit for bit independent of the batch.

Row i of a result is a function of row i of the input alone, whatever the number of rows, so that a token's values do
not depend on its neighbours. Torch does not promise that, hence the restrictions below: matrix products in tiles of
one fixed height, and only such functions whose vector body and scalar tail agree (no sigmoid, rsqrt, silu, gelu).
Called through `quire.ops`; knows neither models nor devices.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_TILE = 32  # rows of every matrix product: one shape, hence one order of summation
BLOCK_ROWS = 64  # rows of an element-wise operation at a time: its fp32 intermediates then stay in cache
_ALIGNMENT = 64  # bytes; a GEMM may choose another path for rows that start elsewhere


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: [M, K], [N, K], [N] -> [M, N], in the dtype of `weight`.

    Each tile of ROW_TILE rows is one product; the last is padded with zero rows.
    """
    num_rows, num_features = x.shape
    num_tiles = -(-num_rows // ROW_TILE)
    out = x.new_empty(num_tiles * ROW_TILE, weight.shape[0])
    x = x.contiguous()
    if x.data_ptr() % _ALIGNMENT:
        x = x.clone()
    transposed = weight.t()
    for start in range(0, num_rows, ROW_TILE):
        tile = x[start : start + ROW_TILE]
        if tile.shape[0] < ROW_TILE:
            padded = x.new_zeros(ROW_TILE, num_features)
            padded[: tile.shape[0]] = tile
            tile = padded
        torch.mm(tile, transposed, out=out[start : start + ROW_TILE])
    out = out[:num_rows]
    return out if bias is None else out.add_(bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in fp32, rounded once (arXiv:1910.07467)."""
    wide_weight = weight.float()

    def norm(rows: Tensor) -> Tensor:
        wide = rows.float()
        scale = (wide * wide).mean(-1, keepdim=True).add_(eps).sqrt_()
        return (wide / scale).mul_(wide_weight)

    return _in_blocks(norm, x.shape[-1], x)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of ``x + residual``, and that sum: the residual stream's next value."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimension (arXiv:1607.06450)."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The norm of ``x + residual``, and that sum."""
    total = x + residual
    return layer_norm(total, weight, bias, eps), total


def silu_and_mul(x: Tensor) -> Tensor:
    """``silu(gate) * up``: [M, 2 I], gate columns first -> [M, I]; in fp32, rounded once (arXiv:2002.05202)."""

    def activate(rows: Tensor) -> Tensor:
        gate, up = rows.chunk(2, dim=-1)
        wide = gate.float()
        return (wide / torch.neg(wide).exp_().add_(1.0)).mul_(up)

    return _in_blocks(activate, x.shape[-1] // 2, x)


def gelu(x: Tensor) -> Tensor:
    """``x / 2 * (1 + erf(x / sqrt 2))``, in fp32 (arXiv:1606.08415)."""

    def activate(rows: Tensor) -> Tensor:
        wide = rows.float()
        return (wide * math.sqrt(0.5)).erf_().add_(1.0).mul_(wide).mul_(0.5)

    return _in_blocks(activate, x.shape[-1], x)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh form of GELU, "gelu_new" and "gelu_pytorch_tanh": ``x / 2 * (1 + tanh(√(2/π) (x + 0.044715 x³)))``."""

    def activate(rows: Tensor) -> Tensor:
        wide = rows.float()
        inner = (wide * wide).mul_(wide).mul_(0.044715).add_(wide).mul_(math.sqrt(2.0 / math.pi))
        return inner.tanh_().add_(1.0).mul_(wide).mul_(0.5)

    return _in_blocks(activate, x.shape[-1], x)


def relu(x: Tensor) -> Tensor:
    """``max(x, 0)``."""
    return torch.relu(x)


def rotary(query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first R features of each head by its position's angles (arXiv:2104.09864, halves, not pairs).

    Feature i and i + R/2 form a plane. Computed in fp32, rounded once.

    Args:
        query, key: [T, Hq, D] and [T, Hkv, D].
        positions: [T] int64.
        cos_sin: fp32 [positions, R], R <= D: R/2 cosines, then R/2 sines.
    """
    angles = cos_sin.index_select(0, positions).unsqueeze(1)
    return _rotate(query, angles), _rotate(key, angles)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    size = angles.shape[-1]

    def rotate(rows: Tensor, angles: Tensor) -> Tensor:
        wide = rows.float()
        cos, sin = angles.chunk(2, dim=-1)
        first, second = wide[..., :size].chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, wide[..., size:]), dim=-1)

    return _in_blocks(rotate, x.shape[-1], x, angles)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Rows of `table`: [T] int64, [V, H] -> [T, H]."""
    return table.index_select(0, ids)


def write_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
    """Store a step's keys and values, each [T, Hkv, D], in a cache [blocks, block_size, 2, Hkv, D].

    slots: int64 [T], block * block_size + offset of each token.
    """
    kv_cache.view(-1, *kv_cache.shape[2:]).index_copy_(0, slots, torch.stack((key, value), dim=1))


def _in_blocks(function: Callable[..., Tensor], size: int, x: Tensor, *others: Tensor) -> Tensor:
    """``function(x, *others)``, a block of rows at a time, in the dtype of `x`; its last dimension is `size`."""
    if x.shape[0] <= BLOCK_ROWS:
        return function(x, *others).to(x.dtype)
    out = x.new_empty((*x.shape[:-1], size))
    for start in range(0, x.shape[0], BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        out[rows] = function(x[rows], *(other[rows] for other in others))
    return out
