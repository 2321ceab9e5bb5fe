"""The host's blocks: what was swapped out of live sequences, and the second tier of the prefix cache.

The KV manager is its only caller. Blocks that a sequence owns here wait to be brought back; all others are an LRU cache
of what the device's pools evicted. It makes a plan's moves, and must not know of queues, tokens or tensors.
"""

from collections import deque
from collections.abc import Sequence

from quire.kvcache.copies import BlockCopy, PlannedCopies
from quire.kvcache.pool import BlockPool
from quire.protocol.cache import CacheLayout
from quire.protocol.stats import TierStats

Named = tuple[int, bytes | None]  # a device's block, and the name of its content where it has one


class HostTier:
    """Host blocks by KV group, and the moves of the plan being made.

    A host block that plan k writes may be read from plan k on, as plans are carried out in order, outward moves first.
    A block that plan k reads is not handed out again before plan k + 1. What plans in flight are still to write counts
    as unproven: should they be forgotten, it is forgotten with them.

    Attributes:
        pools: by group.
        arrivals: what is brought back to the device.
        block_bytes: by group.
        stats: what has moved since the start; whoever keeps the disk's names counts here, too.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self.pools = [BlockPool(count) for count in layout.num_host_blocks]
        self.arrivals = PlannedCopies(self.pools)
        self.block_bytes = layout.block_bytes or [0] * len(self.pools)
        self.stats = TierStats()
        self._out: dict[tuple[int, int], int] = {}  # (group, host block) -> device block
        self._unproven: deque[list[tuple[int, int]]] = deque()  # (group, host block), by plan in flight

    # A plan is made.

    def hold(self, blocks: Sequence[Sequence[Named]]) -> list[list[int]] | None:
        """Own a copy of some device blocks, by group; those whose content is here already are not copied again.

        Returns:
            The host blocks; None, with nothing changed, where there are too few.
        """
        known: list[list[int | None]] = []
        for pool, wanted in zip(self.pools, blocks, strict=True):
            known.append([None if name is None else pool.find(name) for _, name in wanted])
            for block in known[-1]:
                if block is not None:
                    pool.acquire(block)
        if any(pool.num_free < found.count(None) for pool, found in zip(self.pools, known, strict=True)):
            for pool, found in zip(self.pools, known, strict=True):
                pool.release_all([block for block in found if block is not None])
            return None
        return [
            [self._write(group, *entry) if block is None else block for entry, block in zip(wanted, found, strict=True)]
            for group, (wanted, found) in enumerate(zip(blocks, known, strict=True))
        ]

    def keep(self, group: int, evicted: Sequence[tuple[int, bytes]]) -> None:
        """Cache what was evicted from the device in this plan, as far as nothing that is owned stands in the way."""
        pool = self.pools[group]
        for block, name in evicted:
            if not self.touch(group, name) and pool.num_free:
                pool.release(self._write(group, block, name))
                self.stats.host_evictions_total += 1

    def touch(self, group: int, name: bytes) -> bool:
        """Whether a block of that name is here; if so, it was used just now."""
        pool = self.pools[group]
        block = pool.find(name)
        if block is None:
            return False
        pool.acquire(block)
        pool.release(block)
        return True

    def reserve(self, group: int) -> int | None:
        """Own a block that something is to be read to; None where none is free."""
        pool = self.pools[group]
        if not pool.num_free:
            return None
        (host,) = pool.allocate(1)
        self._out.pop((group, host), None)  # this plan was to write it for somebody who has given it up since
        return host

    def settle(self, group: int, block: int, name: bytes | None) -> None:
        """A reserved block has been read, or, without a name, has not: it is a cached one, or free."""
        if name is not None:
            self.pools[group].register(block, name)
        self.pools[group].release(block)

    def bring_in(self, copy: BlockCopy, is_hit: bool) -> None:
        """Copy a host block to a sequence's own; `is_hit`: it was found by its name."""
        self.pools[copy.group].acquire(copy.source)
        self.arrivals.add(copy)
        self.stats.host_hits_total += is_hit

    def end_plan(self) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
        """The plan is complete: its moves to the host, as (group, device, host), and back, as (group, host, device)."""
        out = [(group, device, host) for (group, host), device in self._out.items()]
        in_ = self.arrivals.take()
        self._unproven.append(list(self._out))
        self._out = {}
        self.stats.swapped_out_blocks_total += len(out)
        self.stats.swapped_in_blocks_total += len(in_)
        self.stats.swapped_out_bytes_total += sum(self.block_bytes[group] for group, _, _ in out)
        self.stats.swapped_in_bytes_total += sum(self.block_bytes[group] for group, _, _ in in_)
        return out, in_

    # Plans have been carried out, or never will be.

    def plan_done(self) -> None:
        """The oldest plan's result came: what it wrote is there."""
        self._unproven.popleft()

    def cancel(self) -> None:
        """Plans in flight, and the one being made, are forgotten, and no sequence owns a block any more."""
        for written in [*self._unproven, list(self._out)]:
            for group, block in written:
                self.pools[group].forget(block)
        self._unproven.clear()
        self._out = {}
        self.arrivals.take()

    def _write(self, group: int, block: int, name: bytes | None) -> int:
        pool = self.pools[group]
        (host,) = pool.allocate(1)
        if name is not None:
            pool.register(host, name)
        self._out[group, host] = block
        return host
