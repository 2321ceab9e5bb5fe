"""The contract of an attention backend, and the descriptions of a step and of a layer's attention that it is given.

The worker asks for the cache's shape and allocates it, its device has metadata built once a step and KV group, and
attention layers make one call, `attend`. A backend must not know requests, schedulers or models. The plain-torch
backend in `reference` is the specification.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.attention.step import Step
from quire.ops.batch import AttentionBatch as AttentionBatch
from quire.ops.batch import Tails as Tails
from quire.ops.rope import AttentionSpec as AttentionSpec


@dataclass(frozen=True)
class SlotMoves:
    """Tokens whose keys and values are to lie elsewhere.

    Attributes:
        sources, destinations: int32 [N] slots; every source is read before any destination is written.
        block_size: tokens per block.
        dtype: the model's.
    """

    sources: Tensor
    destinations: Tensor
    block_size: int
    dtype: torch.dtype


class AttentionBackend(ABC):
    """Reads and writes the layers' KV caches; holds no state of any step or layer."""

    @abstractmethod
    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of one layer's cache, in elements of `kv_cache_dtype`. The first dimension is the block."""

    def kv_cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Type of the cache's elements for a model of type `dtype`: here, the same."""
        return dtype

    def build(self, batch: AttentionBatch) -> Any:
        """What `attend` needs of a step; made once for each KV group, shared by the group's layers: here, the batch."""
        return batch

    @abstractmethod
    def attend(self, qkv: Tensor, spec: AttentionSpec, step: Step) -> Tensor:
        """Norm and rotate queries and keys, store keys and values, attend to all that is stored.

        A row's result must not depend on the other rows, on the block size, nor on how the sequence was cut into
        steps (a layer that is not causal must be given a sequence whole); slots at or beyond a sequence's length, or
        outside every window, are never read.

        Args:
            qkv: [T, (Hq + 2 Hkv) D], queries first; may be overwritten.

        Returns:
            [T, Hq D].
        """

    def attend_apart(self, query: Tensor, kv: Tensor, spec: AttentionSpec, step: Step) -> Tensor:
        """`attend`, given queries [T, Hq D] apart from keys and values [T, 2 Hkv D]."""
        return self.attend(torch.cat((query, kv), -1), spec, step)

    def copy_blocks(self, kv_cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
        """Copy whole blocks; int64 [N] each. Every source is read before any destination is written."""
        if kv_cache.device.type == "cpu":  # not by torch's indexing: waking OpenMP's threads takes longer than the copy
            blocks = kv_cache.view(torch.uint8).reshape(len(kv_cache), -1).numpy()
            blocks[destinations.numpy()] = blocks.take(sources.numpy(), 0)
            return
        kv_cache.index_copy_(0, destinations, kv_cache.index_select(0, sources))

    @abstractmethod
    def move_slots(self, kv_cache: Tensor, moves: SlotMoves) -> None:
        """Move tokens' keys and values within a layer's cache."""

    def fill_blocks(self, kv_cache: Tensor, blocks: Tensor, value: float) -> None:
        """Set whole blocks (int64 [N]) to a value; NaN makes reads of what was never written visible."""
        if kv_cache.dtype is torch.int8:  # all bits set: the scales are NaN then
            value = -1 if value != value else int(value)
        kv_cache.index_fill_(0, blocks, value)
