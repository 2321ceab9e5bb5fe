"""The contract of an attention backend, and the descriptions of a step and of a layer's attention that it is given.

The worker asks for the cache's shape and allocates it, its device has metadata built once a step and KV group, and
attention layers make one call, `attend`. A backend must not know requests, schedulers or models. The plain-torch
backend in `reference` is the specification.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.attention.step import Step
from quire.ops.rope import AttentionSpec as AttentionSpec


@dataclass(frozen=True)
class AttentionBatch:
    """Where the T tokens of a step's S sequences lie, as rows and as cache slots.

    Sequence s has the rows [query_start_loc[s], query_start_loc[s + 1]); they are its last positions, up to and
    including seq_lens[s] - 1. Position p lies in block block_tables[s, p // block_size] at offset p % block_size.

    Attributes:
        query_start_loc: int32 [S + 1], as all of these (int64 is taken, too).
        seq_lens: [S], tokens computed before this step plus those computed in it.
        block_tables: [S, max_blocks], padded with 0.
        slot_mapping: [T], block * block_size + offset of every row.
        block_size: tokens per block.
        tails: where drafts are a tree. Each of its nodes is a sequence of one row then, which sees the keys of its
            ancestors where a chain would have those before it, so that its bits are those of a chain.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    block_size: int
    tails: "Tails | None" = None


class Tails(NamedTuple):
    """Positions that are not where block tables say.

    Attributes:
        starts: int32 [S]; position p >= starts[s] of sequence s lies in slot slots[s, p - starts[s]].
        counts: int32 [S]; so many sequences from this one on, of one row each, by position, are of one tree: they have
            one table and one start, and what lies before it may be computed together. 0 where they are counted
            already, 1 for a sequence by itself.
        slots: int32 [S, W].
    """

    starts: Tensor
    counts: Tensor
    slots: Tensor


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
