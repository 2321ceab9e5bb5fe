"""Attention whose queries and keys have a norm over all their heads together, as OLMo 2's have.

`quire.models.builder` makes it. Kernels norm whole rows of activations, so queries have a projection of their own, and
keys stand first among what the other one makes.
"""

from typing import Any

from torch import Tensor

from quire import ops
from quire.attention.step import Step
from quire.layers.attention import SelfAttention
from quire.layers.linear import Linear


class WholeNormAttention(SelfAttention):
    """As `SelfAttention`, with ``q_norm(q_proj(x))`` for queries; `qkv_proj` makes keys and values alone.

    Args:
        q_proj: H -> Hq D.
        others: as of `SelfAttention`: qkv_proj H -> 2 Hkv D, keys first, and norms of [Hq D] and of [Hkv D].
    """

    def __init__(self, q_proj: Linear, *others: Any) -> None:
        super().__init__(*others)
        self.q_proj, self.kv_start = q_proj, 0

    def forward(self, x: Any, step: Step) -> Tensor:
        """[T, H] -> [T, H]."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        query, kv = self.q_norm(self.q_proj(x, step)), self.qkv_proj(x, step)
        kv = ops.rms_norm_first(kv, self.k_norm.weight, self.k_norm.eps)
        return self.o_proj(self.backend.attend_apart(query, kv, self.spec, step), step)
