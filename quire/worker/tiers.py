"""The host's blocks: where a worker keeps KV blocks that the device has no room for.

The runner carries out a plan's moves with it. A host block holds all layers of its KV group one after another, so that
it can go on as one piece. It knows blocks by their numbers; whose they are is the KV manager's to know.
"""

from collections.abc import Sequence

from torch import Tensor

from quire.protocol.cache import CacheGroup
from quire.worker.devices.base import Device


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
        self.blocks: list[Tensor] = []
        for layers, count in zip(self._caches, num_blocks, strict=True):
            block_bytes = sum(cache.nbytes // len(cache) for cache in layers)
            self.blocks.append(device.allocate_host(count, block_bytes))

    def move_out(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy blocks to the host, as (group, device block, host block)."""
        for number, layers in enumerate(self._caches):
            pairs = [(source, destination) for group, source, destination in moves if group == number]
            if pairs:
                self._device.copy_to_host(layers, self.blocks[number], pairs)

    def move_in(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy blocks from the host, as (group, host block, device block)."""
        for number, layers in enumerate(self._caches):
            pairs = [(source, destination) for group, source, destination in moves if group == number]
            if pairs:
                self._device.copy_from_host(self.blocks[number], layers, pairs)
