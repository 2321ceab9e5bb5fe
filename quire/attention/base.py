"""The contract of an attention backend, and the description of a step that all of them are given.

The runner asks for the cache's shape, allocates it, and builds metadata once a step; attention layers write and attend
with it. A backend must not know requests, schedulers or models. The plain-torch backend in `reference` is the
specification.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

Metadata = TypeVar("Metadata")


@dataclass(frozen=True)
class AttentionBatch:
    """Where the T tokens of a step's S sequences lie, as rows and as cache slots.

    Sequence s has the rows [query_start_loc[s], query_start_loc[s + 1]); they are its last positions, up to and
    including seq_lens[s] - 1. Position p lies in block block_tables[s, p // block_size] at offset p % block_size.

    Attributes:
        query_start_loc: int64 [S + 1].
        seq_lens: int64 [S], tokens computed before this step plus those computed in it.
        block_tables: int64 [S, max_blocks], padded with 0.
        slot_mapping: int64 [T], block * block_size + offset of every row.
        block_size: tokens per block.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    block_size: int


class AttentionBackend(ABC, Generic[Metadata]):
    """Reads and writes one layer's KV cache; holds no state of any step or layer."""

    @abstractmethod
    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of one layer's cache, in elements of `kv_cache_dtype`. The first dimension is the block."""

    def kv_cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Type of the cache's elements for a model of type `dtype`: here, the same."""
        return dtype

    @abstractmethod
    def build(self, batch: AttentionBatch) -> Metadata:
        """What `write_kv` and `forward` need of a step; made once, shared by all layers."""

    @abstractmethod
    def write_kv(self, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: Metadata) -> None:
        """Store the step's keys and values, each [T, Hkv, D], at their slots."""

    @abstractmethod
    def forward(
        self, query: Tensor, kv_cache: Tensor, metadata: Metadata, scale: float, sliding_window: int | None
    ) -> Tensor:
        """Causal attention of query [T, Hq, D] to everything cached -> [T, Hq, D].

        Query head h reads KV head h // (Hq / Hkv). With a sliding window of W tokens, position p sees the positions
        p - W + 1 .. p. A row's result must not depend on the other rows, on the block size, nor on how the sequence
        was cut into steps; slots at or beyond a sequence's length, or outside every window, are never read.
        """

    def copy_blocks(self, kv_cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
        """Copy whole blocks; int64 [N] each. Every source is read before any destination is written."""
        kv_cache.index_copy_(0, destinations, kv_cache.index_select(0, sources))

    def fill_blocks(self, kv_cache: Tensor, blocks: Tensor, value: float) -> None:
        """Set whole blocks (int64 [N]) to a value; NaN makes reads of what was never written visible."""
        kv_cache.index_fill_(0, blocks, value)
