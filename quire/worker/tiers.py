"""The tiers below the device: KV blocks in host memory, and on the disk.

The runner carries out a plan's moves with the one, the worker its saves and fetches with the other. A host block holds
all layers of its KV group one after another, so that it can go on as one piece. Blocks are known here by their numbers
and names; whose they are is the KV manager's to know.
"""

import weakref
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.protocol.cache import CacheGroup
from quire.protocol.step import DiskNews, StepPlan
from quire.worker.blockfiles import BlockFiles
from quire.worker.devices.base import Device

WAITING_SECONDS = 0.01  # of a step that has nothing to compute, for the disk
Move = tuple[int, int, int]  # of a block: KV group, source, destination


def by_group(moves: Iterable[Move]) -> dict[int, list[tuple[int, int]]]:
    """Sources and destinations of blocks in each KV group."""
    found: dict[int, list[tuple[int, int]]] = {}
    for group, source, destination in moves:
        found.setdefault(group, []).append((source, destination))
    return found


class HostCache:
    """Host memory for the blocks of all KV groups.

    Args:
        device: copies.
        caches: the KV cache, one tensor a cache layer.
        groups: which layers share blocks.
        num_blocks: host blocks, by group.

    Attributes:
        blocks: by group, uint8 [num_blocks, bytes of a block].

    Raises:
        MemoryError, OSError: there is not that much memory.
    """

    def __init__(
        self, device: Device, caches: Sequence[Tensor], groups: Sequence[CacheGroup], num_blocks: Sequence[int]
    ) -> None:
        self._device = device
        self._caches = [[caches[layer] for layer in group.layers] for group in groups]
        block_bytes = [sum(cache.nbytes // len(cache) for cache in layers) for layers in self._caches]
        self.blocks = [device.allocate_host(*sizes) for sizes in zip(num_blocks, block_bytes, strict=True)]

    def move(self, moves: Sequence[Move], *, out: bool) -> None:
        """Copy blocks out to the host, or else in from there, as (group, source, destination)."""
        for group, pairs in by_group(moves).items():
            self._device.copy(self._caches[group], self.blocks[group], pairs, out=out)

    def copies(self, group: int, device_blocks: Sequence[int]) -> Tensor:
        """What some of the device's blocks hold, uint8 [N, bytes of a block]."""
        found = torch.empty((len(device_blocks), self.blocks[group].shape[1]), dtype=torch.uint8)
        pairs = [(block, place) for place, block in enumerate(device_blocks)]
        self._device.copy(self._caches[group], found, pairs, out=True)
        return found


class DiskCache:
    """Blocks that go from the device to files, and from files to the host.

    Args:
        host: the host's blocks.
        files: started; closed when this one goes.
    """

    def __init__(self, host: HostCache, files: BlockFiles) -> None:
        self._host, self._files = host, files
        self._has_nothing_else = False  # the last plan computes nothing
        self.close = weakref.finalize(self, files.close)

    def begin(self, plan: StepPlan) -> None:
        """Take copies of what a plan saves, before anything of it is carried out, and ask for what it fetches."""
        moves = plan.moves
        self._has_nothing_else = not plan.scheduled
        for group in {group for group, _, _ in moves.save}:
            saves = [(block, name) for number, block, name in moves.save if number == group]
            rows = self._host.copies(group, [block for block, _ in saves]).numpy()
            for row, (_, name) in zip(rows, saves, strict=True):
                self._files.write(group, name, row.data)
        for group, host, name in moves.fetch:
            self._files.read(group, host, name)

    def finish(self) -> DiskNews | None:
        """Put what was read in its host blocks, and tell of it; None where there is nothing new."""
        fetched: list[tuple[int, int, bool]] = []
        for read in self._files.answers(WAITING_SECONDS if self._has_nothing_else else 0.0):
            if read.data is not None:
                self._host.blocks[read.group].numpy()[read.host] = np.frombuffer(read.data, np.uint8)
            fetched.append((read.group, read.host, read.data is not None))
        news = self._files.news(fetched)
        return None if news == DiskNews() else news

    def reset(self) -> None:
        """Forget what was asked."""
        self._files.forget_reads()
