"""The second memory of the KV cache: sequences swapped out to it, and prefixes found in it.

The KV manager has one where the layout has host blocks, and asks it at admission, at preemption and when a plan is
complete. It turns tables and matches into moves of the `HostTier`; plans and policies it does not know.
"""

import sys
from collections.abc import Callable, Sequence

from quire.kvcache.groups import KVGroup
from quire.kvcache.host import HostTier
from quire.kvcache.table import BlockTable, PrefixMatch, Swapped
from quire.protocol.cache import CacheLayout
from quire.protocol.stats import TierStats

Move = tuple[int, int, int]


class SwapSpace:
    """The host's blocks, as tables see them.

    Args:
        layout: has host blocks.
        groups: the device's KV groups.
        name_of: the name of a table's full block.

    Attributes:
        tier: the blocks themselves.
    """

    def __init__(
        self, layout: CacheLayout, groups: Sequence[KVGroup], name_of: Callable[[BlockTable, int], bytes] | None
    ) -> None:
        """Without `name_of` nothing has a name: what is swapped out belongs to its sequence alone."""
        self.tier = HostTier(layout)
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
        return True

    def swapped_ids(self) -> set[int]:
        """As `KVManager.swapped_ids`."""
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

    def stats(self, num_swaps: int) -> TierStats:
        """The figures of this moment; the number of sequences swapped out is the caller's."""
        tier = self.tier
        return TierStats(
            host_cache_usage_perc=max(1.0 - pool.num_free / pool.num_blocks for pool in tier.pools),
            num_swaps_total=num_swaps,
            swapped_out_blocks_total=tier.num_out,
            swapped_in_blocks_total=tier.num_in,
            swapped_out_bytes_total=tier.bytes_out,
            swapped_in_bytes_total=tier.bytes_in,
            host_evictions_total=tier.num_evicted,
            host_hits_total=tier.num_hits,
        )

    # When a plan is complete, or forgotten.

    def end_plan(self) -> tuple[list[Move], list[Move]]:
        """The plan's moves to the host and back; what was evicted in it falls into the host's cache."""
        for number, group in enumerate(self._groups):
            if group.pool.evicted:
                self.tier.keep(number, group.pool.evicted)
                group.pool.evicted = []
        return self.tier.end_plan()

    def cancel(self) -> None:
        """As `KVManager.cancel`."""
        for table in list(self._swapped.values()):
            self.drop_swapped(table)
        self._forget_evicted()
        self.tier.cancel()

    def forget_all(self) -> None:
        """Forget every prefix; what was swapped out stays."""
        self.tier.forget_all()
        self._forget_evicted()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the host's blocks are owned as the swapped tables imply."""
        held = [table.swapped.block_ids for table in self._swapped.values() if table.swapped is not None]
        assert len(held) == len(self._swapped), "a sequence is kept as swapped out, and is not"
        groups = range(len(self._groups))
        self.tier.check_integrity([[block for block_ids in held for block in block_ids[g]] for g in groups])

    def _forget_evicted(self) -> None:
        for group in self._groups:
            group.pool.evicted = []


def first_from_host(match: PrefixMatch) -> int:
    """The first index at which some group has a block to be brought in."""
    return min(
        next((index for index, block in enumerate(found) if block < 0), sys.maxsize) for found in match.block_ids
    )
