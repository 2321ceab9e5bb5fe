"""Between a merged projection and attention: norms of heads, rotation by position, the write to the cache.

The references do one of these each. Natively they are one instruction, `prepare`, that the attention backend records.
"""

from ctypes import Structure
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops.native.builder import ProgramBuilder, Value
from quire.ops.native.structs import HeadSpec, declared, instruction
from quire.ops.rows import in_blocks
from quire.ops.table import op

MAX_HEAD_DIM = 512  # as kMaxHeadDim in csrc/rope.h


@op
def rotary(query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first R features of each head by its position's angles (arXiv:2104.09864, halves, not pairs).

    Feature i and i + R/2 form a plane. Computed in fp32, rounded once.

    Args:
        query, key: [T, Hq, D] and [T, Hkv, D].
        positions: [T] integers.
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

    return in_blocks(rotate, x.shape[-1], x, angles)


@op
def write_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
    """Store a step's keys and values, each [T, Hkv, D], in a cache [blocks, block_size, 2, Hkv, D].

    slots: integers [T], block * block_size + offset of each token.
    """
    kv_cache.view(-1, *kv_cache.shape[2:]).index_copy_(0, slots.long(), torch.stack((key, value), dim=1))


@dataclass(frozen=True)
class HeadShape:
    """How the columns of a merged projection fall into heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def spec(self, layer: int, group: int) -> HeadSpec:
        """For an instruction on the cache of `layer`, of the KV group `group`.

        Raises:
            ValueError: heads that the kernels don't know.
        """
        if self.head_dim > MAX_HEAD_DIM or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self} can't be attended to: head_dim is at most {MAX_HEAD_DIM}, heads come in whole groups"
            )
        return HeadSpec(self.num_heads, self.num_kv_heads, self.head_dim, layer, group)


@dataclass(frozen=True)
class Preparation:
    """What happens to queries and keys before attention, besides the write to the cache.

    Attributes:
        q_norm, k_norm: weights of an RMSNorm over each head, [D]; None for none.
        cos_sin: float32 [positions, rotary_dim], cosines then sines; None for no rotation.
        plus_one: the norms multiply with ``1 + weight``.
    """

    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    cos_sin: Tensor | None = None
    plus_one: bool = False


@instruction("prepare", wants_step=True)
class PrepareSpec(Structure):
    _fields_ = [
        ("heads", HeadSpec),
        *declared("ptr q_norm k_norm cos_sin; i64 rotary_dim; f32 eps; i32 plus_one"),
    ]


def prepare(qkv: Value, heads: HeadShape, preparation: Preparation, *, layer: int, group: int = 0) -> Value:
    """Record: norm and rotate queries and keys of qkv [T, (Hq + 2 Hkv) D], in place; write keys and values.

    layer, group: which of the run's caches, and which of its steps says where tokens lie in it.

    Raises:
        ValueError: a shape or type that doesn't fit.
    """
    if qkv.width != (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim:
        raise ValueError(f"{qkv.width} columns are not {heads}")
    builder = qkv.builder
    spec = PrepareSpec(
        heads=heads.spec(layer, group),
        q_norm=builder.vector(preparation.q_norm, heads.head_dim),
        k_norm=builder.vector(preparation.k_norm, heads.head_dim),
        eps=preparation.eps,
        plus_one=preparation.plus_one,
    )
    if preparation.cos_sin is not None:
        spec.cos_sin, spec.rotary_dim = _rotation(builder, preparation.cos_sin, heads.head_dim)
    return builder.append_in_place(spec, qkv)


def _rotation(builder: ProgramBuilder, table: Tensor, head_dim: int) -> tuple[int, int]:
    if table.dtype != torch.float32 or not table.is_contiguous() or table.shape[1] > head_dim:
        raise ValueError("cos_sin must be contiguous float32 [positions, rotary_dim <= head_dim]")
    return builder.address(table), table.shape[1]
