"""The attention layer, which knows its heads, window and cache, and the block around it with its projections."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from quire.attention.base import AttentionBackend
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.ops.native.program import HeadShape, Preparation, Value


@dataclass(frozen=True)
class HeadLayout:
    """Query heads, the KV heads that they share, and the features of each."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class Attention(nn.Module):
    """Writes keys and values to one layer's cache and attends to all that it holds.

    Args:
        layer_index: which of the step's caches is this layer's.
        scale: factor on the scores; default 1 / sqrt(head_dim).
        sliding_window: tokens that a query sees, itself included; None for all.
    """

    def __init__(
        self,
        backend: AttentionBackend[Any],
        layer_index: int,
        heads: HeadLayout,
        *,
        scale: float | None = None,
        sliding_window: int | None = None,
    ) -> None:
        super().__init__()
        self.backend = backend
        self.layer_index = layer_index
        self.heads = heads
        self.scale = heads.head_dim**-0.5 if scale is None else scale
        self.sliding_window = sliding_window

    def forward(self, query: Tensor, key: Tensor, value: Tensor, kv_caches: list[Tensor], metadata: Any) -> Tensor:
        """query [T, Hq, D], key and value [T, Hkv, D] -> [T, Hq, D]."""
        cache = kv_caches[self.layer_index]
        self.backend.write_kv(key, value, cache, metadata)
        return self.backend.forward(query, cache, metadata, self.scale, self.sliding_window)


class SelfAttention(nn.Module):
    """Projections, optional norms of each head, optional rotation, attention, output projection.

    Args:
        qkv_proj: H -> (Hq + 2 Hkv) * D, queries first.
        o_proj: Hq * D -> H.
        q_norm, k_norm: over the head dimension, before the rotation (Qwen3).
    """

    def __init__(
        self,
        attention: Attention,
        qkv_proj: Linear,
        o_proj: Linear,
        rotary: RotaryEmbedding | None = None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.rotary = rotary
        self.q_norm = q_norm
        self.k_norm = k_norm

    def forward(self, x: Tensor, positions: Tensor, kv_caches: list[Tensor], metadata: Any) -> Tensor:
        """[T, H] -> [T, H]."""
        qkv = self.qkv_proj(x)
        attended = self._record(qkv) if isinstance(qkv, Value) else self._attend(qkv, positions, kv_caches, metadata)
        return self.o_proj(attended)

    def _attend(self, qkv: Tensor, positions: Tensor, kv_caches: list[Tensor], metadata: Any) -> Tensor:
        heads = self.attention.heads
        num_heads, num_kv_heads = heads.num_heads, heads.num_kv_heads
        qkv = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, heads.head_dim)
        query, key, value = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if self.rotary is not None:
            query, key = self.rotary(query, key, positions)
        attended = self.attention(query, key, value, kv_caches, metadata)
        return attended.reshape(qkv.shape[0], -1)

    def _record(self, qkv: Value) -> Any:
        """The same as two instructions of a native program: prepare (norms, rotation, cache write) and attend."""
        attention, heads = self.attention, self.attention.heads
        q_norm, k_norm = self.q_norm, self.k_norm
        prepare = Preparation(
            q_norm=None if q_norm is None else q_norm.weight.data,
            k_norm=None if k_norm is None else k_norm.weight.data,
            eps=0.0 if q_norm is None else q_norm.eps,
            cos_sin=None if self.rotary is None else self.rotary.cos_sin,
        )
        shape = HeadShape(heads.num_heads, heads.num_kv_heads, heads.head_dim)
        layer, window = attention.layer_index, attention.sliding_window
        qkv = qkv.builder.prepare(qkv, shape, prepare, layer=layer)
        return qkv.builder.attend(qkv, shape, layer=layer, scale=attention.scale, window=window)
