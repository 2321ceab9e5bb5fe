"""The KV cache of a worker as a whole: what plans ask of it, carried out in all layers of a group.

The worker makes it, the model runner calls it. It knows blocks and slots, and no row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, SlotMoves
from quire.protocol.cache import CacheGroup
from quire.protocol.step import Moves
from quire.worker.gather import Ints
from quire.worker.tiers import HostCache, by_group


@dataclass(frozen=True)
class KVCache:
    """The KV cache of a worker: one tensor a cache layer, in the backend's shape, and which layers share blocks."""

    backend: AttentionBackend
    tensors: list[Tensor]
    groups: list[CacheGroup]
    host: HostCache | None = None
    dtype: torch.dtype = torch.float32  # the model's

    def carry_out(self, moves: Moves) -> None:
        """Out to the host, within the device, and in."""
        assert self.host is not None or not (moves.out or moves.in_), "there are no blocks in host memory"
        if self.host is not None and moves.out:
            self.host.move(moves.out, out=True)
        for group, pairs in by_group(moves.copies).items():
            sources, destinations = torch.tensor(pairs, device=self.tensors[0].device).unbind(1)
            for layer in self.groups[group].layers:
                self.backend.copy_blocks(self.tensors[layer], sources, destinations)
        if self.host is not None and moves.in_:
            self.host.move(moves.in_, out=False)

    def move_slots(self, sources: Sequence[Ints], destinations: Sequence[Ints], block_size: int) -> None:
        """Move tokens' keys and values, given by their slots in each group."""
        for group, of_group, to in zip(self.groups, sources, destinations, strict=True):
            source, destination = (torch.from_numpy(each).to(self.tensors[0].device) for each in (of_group, to))
            moves = SlotMoves(source, destination, block_size, self.dtype)
            for layer in group.layers:
                self.backend.move_slots(self.tensors[layer], moves)

    def poison(self, block_ids: Sequence[Sequence[int]]) -> None:
        """Fill blocks, by group, with NaN, so that reading what was never written shows."""
        for group, ids in zip(self.groups, block_ids, strict=False):
            if ids:
                blocks = torch.tensor(ids, device=self.tensors[0].device)
                for layer in group.layers:
                    self.backend.fill_blocks(self.tensors[layer], blocks, float("nan"))
