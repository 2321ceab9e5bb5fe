"""The second memory of the KV cache: sequences swapped out to it, and prefixes found in it.

The KV manager has one where the layout has host blocks, and asks it at admission, at preemption and when a plan is
complete. Blocks that a sequence owns here wait to be brought back; all others are an LRU cache of what the device's
pools evicted. It makes a plan's moves, and knows no queues, policies or tensors. Times come in as numbers: there is no
clock here, so that a simulation decides the same each time.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, zip_longest
from typing import Any

from msgspec import structs

from quire.kvcache.copies import PlannedCopies
from quire.kvcache.disk import DiskTier
from quire.kvcache.groups import KVGroup
from quire.kvcache.pool import BlockPool
from quire.kvcache.prefix import longest_prefix
from quire.kvcache.table import BlockTable, PrefixMatch, Swapped
from quire.protocol.cache import CacheLayout
from quire.protocol.stats import TierStats
from quire.protocol.step import Moves

MEASURED_TOKENS = 32  # of prompts in a step, from which on its time says what a token costs to compute again

Named = tuple[int, bytes | None]  # a device's block, and the name of its content where it has one


class SwapSpace:
    """The host's blocks by KV group, and the moves of the plan being made.

    A host block that plan k writes may be read from plan k on, as plans are carried out in order, outward moves first.
    A block that plan k reads is not handed out again before plan k + 1. What plans in flight are still to write counts
    as unproven: should they be forgotten, it is forgotten with them.

    Args:
        layout: has host blocks.
        groups: the device's KV groups.
        stored: the names of blocks on the disk, by group; None without such a tier.

    Attributes:
        pools: by group.
        arrivals: what is brought back to the device.
        disk: the files, where there are such.
        swapped: the tables that own blocks here, by sequence id.
    """

    def __init__(
        self, layout: CacheLayout, groups: Sequence[KVGroup], stored: Sequence[Sequence[bytes]] | None = None
    ) -> None:
        self.pools = [BlockPool(count) for count in layout.num_host_blocks]
        self.arrivals = PlannedCopies(self.pools)
        self.swapped: dict[int, BlockTable] = {}
        self._stats = TierStats()
        self.disk = DiskTier(stored, self.pools, self._stats) if stored is not None else None
        self._groups, self._size = groups, layout.block_size
        self._out: dict[tuple[int, int], int] = {}  # (group, host block) -> device block
        self._unproven: deque[list[tuple[int, int]]] = deque()  # (group, host block), by plan in flight
        self._block_bytes = layout.block_bytes or [0] * len(self.pools)
        speed = layout.copy_bytes_per_second
        self._token_seconds = 0.0  # to compute one of a prompt; not measured yet
        self._copy_seconds = [size / speed if speed else 0.0 for size in self._block_bytes]
        self._evicted: list[list[tuple[int, bytes]]] = [[] for _ in groups]  # in this plan, blocks and their names
        for group, evicted in zip(groups, self._evicted, strict=True):
            group.pool.on_evicted.append(evicted.append)

    # At preemption.

    def learn(self, num_tokens: int, num_sequences: int, seconds: float) -> None:
        """A step of so many tokens and sequences took so long; mostly of prompts, it tells what computing costs."""
        if num_tokens - num_sequences >= MEASURED_TOKENS:
            measured, known = seconds / num_tokens, self._token_seconds
            self._token_seconds = 0.8 * known + 0.2 * measured if known else measured

    def pays(self, table: BlockTable, num_computed_tokens: int) -> bool:
        """Whether copying a table's blocks to the host and back is faster than computing its tokens again.

        Where one of the prices is not known, copying is taken for the cheaper.
        """
        held = zip(table.block_ids, table.first_block, self._copy_seconds, strict=True)
        copying = 2.0 * sum((len(block_ids) - first) * seconds for block_ids, first, seconds in held)
        computing = num_computed_tokens * self._token_seconds
        return not computing or copying < computing

    def swap_out(self, table: BlockTable, num_computed_tokens: int) -> bool:
        """As `KVManager.swap_out`, of a table that no move of this plan concerns but these."""
        if not num_computed_tokens or self.arrivals.concern(table.sequence_id):
            return False
        stop = -(-num_computed_tokens // self._size)
        firsts = [group.first_visible(num_computed_tokens) for group in self._groups]
        names = table.hashes[: min(max(table.num_committed, table.num_found), num_computed_tokens // self._size)]
        names += [None] * (stop - len(names))
        blocks = [
            list(zip(block_ids[first:stop], names[first:], strict=True))
            for block_ids, first in zip(table.block_ids, firsts, strict=True)
        ]
        if (held := self._hold(blocks)) is None:
            return False
        table.swapped = Swapped(num_computed_tokens, held)
        self.swapped[table.sequence_id] = table
        self._stats.num_swaps_total += 1
        return True

    def drop_swapped(self, table: BlockTable) -> None:
        """Give up what the host holds of a sequence."""
        if table.swapped is None:
            return
        for pool, block_ids in zip(self.pools, table.swapped.block_ids, strict=True):
            pool.release_all(block_ids)
        table.swapped = None
        del self.swapped[table.sequence_id]

    def _hold(self, blocks: Sequence[Sequence[Named]]) -> list[list[int]] | None:
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

    def _write(self, group: int, block: int, name: bytes | None) -> int:
        pool = self.pools[group]
        (host,) = pool.allocate(1)
        if name is not None:
            pool.register(host, name)
        self._out[group, host] = block
        return host

    # At admission.

    def longest_known(self, name_of: Callable[[int], bytes], limit: int, on_disk: bool = False) -> int:
        """As `longest_prefix`, of what the device, the host and, if asked, the disk hold."""
        lookups = [self._lookup(number, on_disk) for number in range(len(self._groups))]
        return longest_prefix(self._groups, name_of, limit, lookups)

    def fetch(self, table: BlockTable, name_of: Callable[[int], bytes], num_known: int, limit: int) -> bytes | None:
        """Have the disk's part of a prefix read to the host, after `num_known` blocks that are here or on the device.

        Returns:
            The name of the block after which it is there, or could not be read; None: there is nothing to wait for.
        """
        if (disk := self.disk) is None or table.fetched or num_known >= limit:
            return None
        under_way = set(disk.under_way.values())
        if (name := name_of(num_known)) in under_way:
            return name
        limit = min(limit, num_known + min(pool.num_free for pool in self.pools))
        num_reached = self.longest_known(name_of, limit, on_disk=True)
        if num_reached <= num_known:
            return None
        table.fetched = True
        missing: list[tuple[int, bytes]] = []
        for index in range(num_reached):
            name = name_of(index)
            for number, group in enumerate(self._groups):
                is_needed = index >= group.first_visible(num_reached * self._size) and not group.pool.holds(name)
                if is_needed and not self._touch(number, name) and name not in under_way:
                    missing.append((number, name))
        last: bytes | None = None
        for number, name in missing:
            if not self.pools[number].num_free:
                break
            (host,) = self.pools[number].allocate(1)
            self._out.pop((number, host), None)  # this plan was to write it for somebody who has given it up since
            disk.fetch(number, host, last := name)
        return last

    def complete(self, number: int, names: list[bytes], found: list[int | None], swapped: Swapped | None) -> list[int]:
        """A group's matched blocks: those that were not found on the device are here, b as -1 - b.

        They have these names; those of a swapped sequence are its own, and the last of them may be partial.
        """
        hosts: Iterable[Any] = map(self.pools[number].find, names) if swapped is None else swapped.block_ids[number]
        return [-1 - host if block is None else block for block, host in zip_longest(found, hosts)]

    def bring_in(self, table: BlockTable, number: int, found: list[int], is_swapped: bool) -> list[int]:
        """A group's matched blocks, those of the host replaced by fresh ones to which they will be copied."""
        fresh = iter(self._groups[number].pool.allocate(sum(1 for block in found if block < 0)))
        block_ids: list[int] = []
        for block in found:
            if block < 0:
                host_block, block = -1 - block, next(fresh)
                self.pools[number].acquire(host_block)
                self.arrivals.add(table.sequence_id, (number, host_block, block))
                self._stats.host_hits_total += not is_swapped
            block_ids.append(block)
        return block_ids

    def _touch(self, group: int, name: bytes) -> bool:
        """Whether a block of that name is here; if so, it was used just now."""
        pool = self.pools[group]
        if (block := pool.find(name)) is not None:
            pool.acquire(block)
            pool.release(block)
        return block is not None

    def stats(self) -> TierStats:
        """The figures of this moment."""
        usage = max(1.0 - pool.num_free / pool.num_blocks for pool in self.pools)
        return structs.replace(self._stats, host_cache_usage_perc=usage)

    # When a plan is complete, carried out, or forgotten.

    def end_plan(self, copies: list[tuple[int, int, int]]) -> Moves:
        """All moves of the plan, these copies among them; what was evicted in it falls into the host's cache."""
        for number, evicted in enumerate(self._evicted):
            self._keep(number, evicted)
            evicted.clear()
        out = [(group, device, host) for (group, host), device in self._out.items()]
        in_ = self.arrivals.take()
        self._unproven.append(list(self._out))
        self._out = {}
        self._stats.swapped_out_blocks_total += len(out)
        self._stats.swapped_in_blocks_total += len(in_)
        self._stats.swapped_out_bytes_total += sum(self._block_bytes[group] for group, _, _ in out)
        self._stats.swapped_in_bytes_total += sum(self._block_bytes[group] for group, _, _ in in_)
        save, fetch = self.disk.end_plan() if self.disk is not None else ([], [])
        return Moves(out, copies, in_, save, fetch)

    def _keep(self, group: int, evicted: Sequence[tuple[int, bytes]]) -> None:
        """Cache what was evicted from the device in this plan, as far as nothing that is owned stands in the way."""
        pool = self.pools[group]
        for block, name in evicted:
            if not self._touch(group, name) and pool.num_free:
                pool.release(self._write(group, block, name))
                self._stats.host_evictions_total += 1

    def plan_done(self) -> None:
        """The oldest plan's result came: what it wrote is there."""
        self._unproven.popleft()

    def cancel(self) -> None:
        """As `KVManager.cancel`."""
        for table in list(self.swapped.values()):
            self.drop_swapped(table)
        self._forget_evicted()
        if self.disk is not None:
            self.disk.cancel()
        for group, block in chain(*self._unproven, self._out):
            self.pools[group].forget(block)
        self._unproven.clear()
        self._out = {}
        self.arrivals.take()

    def forget_all(self) -> None:
        """Forget every prefix; what was swapped out stays, and what is on the disk."""
        for pool in self.pools:
            pool.forget_all()
        self._forget_evicted()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the host's blocks are owned as the swapped tables imply."""
        self.arrivals.check_none()
        held = [table.swapped.block_ids for table in self.swapped.values() if table.swapped is not None]
        assert len(held) == len(self.swapped), "a sequence is kept as swapped out, and is not"
        for number, pool in enumerate(self.pools):
            pool.check_integrity()
            owners = Counter(block for block_ids in held for block in block_ids[number])
            if self.disk is not None:
                owners.update(self.disk.owned(number))
            counts = {block: count for block, count in enumerate(pool.ref_counts) if count}
            assert owners == counts, "host blocks are owned by nobody, or freed twice"

    def _lookup(self, number: int, on_disk: bool) -> Callable[[bytes], bool]:
        """Whether a group's block of a name is anywhere."""
        device, host = self._groups[number].pool, self.pools[number]
        files = self.disk.known[number] if self.disk is not None and on_disk else ()
        return lambda name: device.holds(name) or host.holds(name) or name in files

    def _forget_evicted(self) -> None:
        for evicted in self._evicted:
            evicted.clear()


def first_from_host(match: PrefixMatch) -> int:
    """The first index at which some group has a block to be brought in."""
    return min(index for found in match.block_ids for index, block in enumerate(found) if block < 0)
