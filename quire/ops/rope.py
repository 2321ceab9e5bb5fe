"""Between a merged projection and attention: norms of heads, rotation by position, the write to the cache.

The references do one of these each. Natively they are one instruction, `prepare`, that the attention backend records,
as is `quire.ops.attention.attend` after it; both follow one description of a layer's attention, `AttentionSpec`.
"""

from ctypes import Structure
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops.elementwise import in_blocks
from quire.ops.lora import LoraLayer
from quire.ops.native.builder import Value
from quire.ops.native.structs import c_struct
from quire.ops.table import op

MAX_HEAD_DIM = 512  # as kMaxHeadDim in csrc/rope.h


@op
def rotary(query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first R features of each head by its position's angles (arXiv:2104.09864, halves, not pairs).

    Feature i and i + R/2 form a plane. Computed in fp32, rounded once.

    Args:
        query, key: [T, Hq, D] and [T, Hkv, D].
        positions: [T] integers.
        cos_sin: fp32 [positions, R], R <= D: R/2 cosines, then R/2 sines; or two such tables, of keys and of queries.
    """
    angles = cos_sin.index_select(-2, positions).unsqueeze(-2)
    own, theirs = (angles, angles) if angles.dim() == 3 else angles
    return _rotate(query, theirs), _rotate(key, own)


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
    kv_cache.view(-1, *kv_cache.shape[2:]).index_copy_(0, slots.to(key.device).long(), torch.stack((key, value), dim=1))


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """What one layer's attention computes, whatever the step.

    Attributes:
        num_heads, num_kv_heads: Hq and Hkv; query head h reads KV head h // (Hq / Hkv).
        head_dim: D, features of a head.
        scale: factor on the scores.
        window: position p sees the positions p - window + 1 .. p (.. p + window - 1 where not causal); None: all.
        start: the first position that is seen (no token before it is given to the layer); not with a window.
        softcap: scores s become ``softcap * tanh(s / softcap)``.
        sinks: [Hq], scores of one more key for each head, whose value is zero.
        causal: whether a position sees those after it; where not, it sees all that the sequence has so far.
        q_norm, k_norm: weights [D] of an RMSNorm over each head of queries and keys, before the rotation.
        norm_plus_one: these norms multiply by 1 + weight.
        rope: fp32 [positions, R], R <= D: R/2 cosines, then R/2 sines, by which queries and keys are rotated; or
            [2, positions, R], by the first one keys and by the second one queries.
        group: the KV group that the layer's blocks belong to: which of the step's metadata is meant.
        layer: which of the step's caches is meant.
        prefix: adapters' keys and values [2 Hkv D] of virtual tokens, as they are to be in the cache.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    start: int = 0
    softcap: float | None = None
    sinks: Tensor | None = None
    causal: bool = True
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    norm_eps: float = 0.0
    norm_plus_one: bool = False
    rope: Tensor | None = None
    group: int = 0
    layer: int = 0
    prefix: LoraLayer | None = None

    @property
    def queries_ahead(self) -> int:
        """Where the table that queries are rotated by begins in `rope`, in numbers; 0 where it is that of keys, too."""
        return 0 if self.rope is None or self.rope.dim() == 2 else self.rope[0].numel()

    @property
    def qkv_size(self) -> int:
        """Columns of queries, keys and values together."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def heads(self) -> Structure:
        """What instructions are told of the heads.

        Raises:
            ValueError: heads that the kernels don't know.
        """
        if self.head_dim > MAX_HEAD_DIM or self.num_heads % max(1, self.num_kv_heads):
            raise ValueError(
                f"{self.num_heads} heads of {self.head_dim} features over {self.num_kv_heads} KV heads can't be "
                f"attended to: head_dim is at most {MAX_HEAD_DIM}, heads come in whole groups"
            )
        names = ("num_heads", "num_kv_heads", "head_dim", "layer", "group")
        return c_struct("HeadSpec")(**{name: getattr(self, name) for name in names})


def prepare(qkv: Value, spec: AttentionSpec) -> Value:
    """Record: norm and rotate queries and keys of qkv [T, (Hq + 2 Hkv) D], in place; write keys and values.

    Raises:
        ValueError: a shape or type that doesn't fit.
    """
    if qkv.width != spec.qkv_size:
        raise ValueError(f"{qkv.width} columns are not the {spec.qkv_size} of queries, keys and values")
    builder = qkv.builder
    told = {
        "heads": spec.heads(),
        "q_norm": builder.vector(spec.q_norm, spec.head_dim),
        "k_norm": builder.vector(spec.k_norm, spec.head_dim),
        "eps": spec.norm_eps,
        "plus_one": spec.norm_plus_one,
    }
    if spec.prefix is not None:
        told["prefix"] = builder.hold(spec.prefix, spec.prefix.struct)
    if (table := spec.rope) is not None:
        if table.dtype != torch.float32 or not table.is_contiguous() or table.shape[-1] > spec.head_dim:
            raise ValueError("cos_sin must be contiguous float32 [positions, rotary_dim <= head_dim]")
        told |= {"cos_sin": builder.address(table), "rotary_dim": table.shape[-1], "queries_ahead": spec.queries_ahead}
    return builder.append("prepare", [qkv], qkv, needs_step=True, **told)
