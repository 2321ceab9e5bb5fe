"""The second memory of the KV cache: sequences swapped out to it, and prefixes found in it.

The KV manager has one where the layout has host blocks, and asks it at admission, at preemption and when a plan is
complete. It turns tables and matches into moves of the `HostTier`; plans and policies it does not know.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial

from msgspec import structs

from quire.kvcache.disk import DiskTier
from quire.kvcache.groups import KVGroup
from quire.kvcache.host import HostTier
from quire.kvcache.prefix import longest_prefix
from quire.kvcache.table import BlockTable, PrefixMatch, Swapped
from quire.protocol.cache import CacheLayout
from quire.protocol.stats import TierStats
from quire.protocol.step import DiskNews, Moves

Move = tuple[int, int, int]


class SwapSpace:
    """The host's blocks, as tables see them.

    Args:
        layout: has host blocks.
        groups: the device's KV groups.
        name_of: the name of a table's full block.

    Attributes:
        tier: the blocks themselves.
        disk: the files, where there are such.
    """

    def __init__(
        self,
        layout: CacheLayout,
        groups: Sequence[KVGroup],
        name_of: Callable[[BlockTable, int], bytes] | None,
        stored: Sequence[Sequence[bytes]] | None = None,
    ) -> None:
        """Without `name_of` nothing has a name: what is swapped out belongs to its sequence alone.

        `stored`: the names on the disk, by group; None without such a tier.
        """
        self.tier = HostTier(layout)
        self.disk = DiskTier(stored, self.tier.stats) if stored is not None and name_of is not None else None
        self._groups = groups
        self._size = layout.block_size
        self._name_of = name_of
        self._swapped: dict[int, BlockTable] = {}  # those that own blocks here
        speed = layout.copy_bytes_per_second
        self._copy_seconds = [size / speed if speed else 0.0 for size in self.tier.block_bytes]
        for group in groups:
            group.pool.evicted = []

    # At preemption.

    def seconds(self, table: BlockTable) -> float:
        """What it takes to copy a table's blocks to the host and back; 0.0: not known."""
        held = zip(table.block_ids, table.first_block, self._copy_seconds, strict=True)
        return 2.0 * sum((len(block_ids) - first) * seconds for block_ids, first, seconds in held)

    def swap_out(self, table: BlockTable, num_computed_tokens: int) -> bool:
        """As `KVManager.swap_out`, of a table that no move of this plan concerns but these."""
        if not num_computed_tokens or self.tier.brings(table.sequence_id):
            return False
        stop, num_named = -(-num_computed_tokens // self._size), 0
        if self._name_of is not None:
            num_named = min(max(table.num_committed, table.num_found), num_computed_tokens // self._size)
        firsts = [group.first_visible(num_computed_tokens) for group in self._groups]
        names = table.hashes[:num_named] + [None] * (stop - num_named)
        held = self.tier.hold(
            [
                list(zip(block_ids[first:stop], names[first:], strict=True))
                for block_ids, first in zip(table.block_ids, firsts, strict=True)
            ]
        )
        if held is None:
            return False
        table.swapped = Swapped(num_computed_tokens, firsts, held)
        self._swapped[table.sequence_id] = table
        self.tier.stats.num_swaps_total += 1
        return True

    def swapped_ids(self) -> set[int]:
        """The sequences for which there are blocks here."""
        return set(self._swapped)

    def drop_swapped(self, table: BlockTable) -> None:
        """Give up what the host holds of a sequence."""
        if table.swapped is None:
            return
        for number, block_ids in enumerate(table.swapped.block_ids):
            self.tier.release(number, block_ids)
        table.swapped = None
        del self._swapped[table.sequence_id]

    # At admission.

    def longest_known(self, name_of: Callable[[int], bytes], limit: int, on_disk: bool = False) -> int:
        """As `longest_prefix`, of what the device, the host and, if asked, the disk hold."""
        disk = self.disk if on_disk else None
        lookups: list[Callable[[bytes], bool]] = []
        for number, (group, pool) in enumerate(zip(self._groups, self.tier.pools, strict=True)):
            places = [group.pool.holds, pool.holds, *([disk.knows(number)] if disk is not None else ())]
            lookups.append(partial(_is_in, places))
        return longest_prefix(self._groups, name_of, limit, lookups)

    def fetch(self, table: BlockTable, num_known: int, limit: int) -> bytes | None:
        """Have the disk's part of a prefix read to the host, after `num_known` blocks that are here or on the device.

        Returns:
            The name of the block after which it is there, or could not be read; None: there is nothing to wait for.
        """
        disk, name_of = self.disk, self._name_of
        if disk is None or name_of is None or table.fetched or num_known >= limit:
            return None
        if disk.is_under_way(name := name_of(table, num_known)):
            return name
        limit = min(limit, num_known + min(pool.num_free for pool in self.tier.pools))
        num_reached = self.longest_known(lambda index: name_of(table, index), limit, on_disk=True)
        if num_reached <= num_known:
            return None
        table.fetched = True
        missing: list[tuple[int, bytes]] = []
        for index in range(num_reached):
            name = name_of(table, index)
            for number, group in enumerate(self._groups):
                if index < group.first_visible(num_reached * self._size) or group.pool.find(name) is not None:
                    continue
                if not self.tier.touch(number, name) and not disk.is_under_way(name):
                    missing.append((number, name))
        last: bytes | None = None
        for number, name in missing:
            host = self.tier.reserve(number)
            if host is None:
                break
            disk.fetch(number, host, last := name)
        return last

    def take(self, news: DiskNews) -> list[bytes]:
        """The disk's answers came; returns the names of blocks that nobody need wait for any longer."""
        assert self.disk is not None, "news of a disk that nobody asked"
        answers, settled = self.disk.take(news)
        for (group, host, name), was_read in answers:
            self.tier.settle(group, host, name if was_read else None)
        return settled

    def match(self, table: BlockTable, num_tokens: int) -> PrefixMatch:
        """A match of tokens whose blocks are all on the device or here; only a swapped sequence's last may be partial.

        What the device still has is shared with whoever uses it; the rest is to be brought in.
        """
        swapped = table.swapped if table.swapped is not None and table.swapped.num_tokens == num_tokens else None
        names: list[bytes] = []
        if self._name_of is not None:
            names = [self._name_of(table, index) for index in range(num_tokens // self._size)]
        block_ids: list[list[int]] = []
        num_from_host = 0
        for number, group in enumerate(self._groups):
            first = group.first_visible(num_tokens)
            found = [0] * first
            for index in range(first, -(-num_tokens // self._size)):
                block = group.pool.find(names[index]) if index < len(names) else None
                if block is None:
                    if swapped is not None:
                        host_block = swapped.block_ids[number][index - swapped.first_block[number]]
                    else:
                        host_block = self.tier.pools[number].find(names[index])
                        assert host_block is not None, "a block that was found is gone"
                    block = -1 - host_block
                    num_from_host += 1
                found.append(block)
            block_ids.append(found)
        return PrefixMatch(num_tokens, block_ids, None, num_from_host, swapped is not None)

    def bring_in(self, table: BlockTable, number: int, found: list[int], is_swapped: bool) -> list[int]:
        """A group's matched blocks, those of the host replaced by fresh ones to which they will be copied."""
        fresh = iter(self._groups[number].pool.allocate(sum(1 for block in found if block < 0)))
        block_ids: list[int] = []
        for block in found:
            if block < 0:
                host_block, block = -1 - block, next(fresh)
                self.tier.acquire(number, host_block, is_hit=not is_swapped)
                self.tier.bring_in(table.sequence_id, number, host_block, block)
            block_ids.append(block)
        return block_ids

    def stats(self) -> TierStats:
        """The figures of this moment."""
        usage = max(1.0 - pool.num_free / pool.num_blocks for pool in self.tier.pools)
        return structs.replace(self.tier.stats, host_cache_usage_perc=usage)

    # When a plan is complete, or forgotten.

    def end_plan(self, copies: list[Move]) -> Moves:
        """All moves of the plan, these copies among them; what was evicted in it falls into the host's cache."""
        for number, group in enumerate(self._groups):
            if group.pool.evicted:
                self.tier.keep(number, group.pool.evicted)
                group.pool.evicted = []
        out, in_ = self.tier.end_plan()
        save, fetch = self.disk.end_plan() if self.disk is not None else ([], [])
        return Moves(out, copies, in_, save, fetch)

    def cancel(self) -> None:
        """As `KVManager.cancel`."""
        for table in list(self._swapped.values()):
            self.drop_swapped(table)
        self._forget_evicted()
        for group, host in self.disk.cancel() if self.disk is not None else ():
            self.tier.settle(group, host, None)
        self.tier.cancel()

    def forget_all(self) -> None:
        """Forget every prefix; what was swapped out stays."""
        self.tier.forget_all()
        self._forget_evicted()
        if self.disk is not None:
            self.disk.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the host's blocks are owned as the swapped tables imply."""
        held = [table.swapped.block_ids for table in self._swapped.values() if table.swapped is not None]
        assert len(held) == len(self._swapped), "a sequence is kept as swapped out, and is not"
        owned = [[block for block_ids in held for block in block_ids[g]] for g in range(len(self._groups))]
        if self.disk is not None:
            owned = [blocks + self.disk.owned(group) for group, blocks in enumerate(owned)]
        self.tier.check_integrity(owned)

    def _forget_evicted(self) -> None:
        for group in self._groups:
            group.pool.evicted = []


def _is_in(places: Sequence[Callable[[bytes], bool]], name: bytes) -> bool:
    return any(holds(name) for holds in places)


def first_from_host(match: PrefixMatch) -> int:
    """The first index at which some group has a block to be brought in."""
    return min(
        next((index for index, block in enumerate(found) if block < 0), sys.maxsize) for found in match.block_ids
    )
