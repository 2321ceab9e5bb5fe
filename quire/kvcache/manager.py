"""The KV manager: block tables of running sequences, prefix sharing, forks and copy-on-write, over all KV groups.

The scheduler opens a table per sequence, asks for blocks before a step and commits what the step computed; resets, pins
and events are the engine core's to ask for. It sees token ids to name prefixes by, and never a tensor, a queue or a
policy.
"""

import sys
from collections import Counter
from collections.abc import Sequence

from quire.kvcache.copies import PlannedCopies
from quire.kvcache.events import KVEventLog
from quire.kvcache.groups import KVGroup, window_reach
from quire.kvcache.pins import Pins
from quire.kvcache.prefix import BlockHasher, longest_prefix
from quire.kvcache.residency import ResidencyTimes
from quire.kvcache.swap import SwapSpace, first_from_host
from quire.kvcache.table import NEVER, NO_MATCH, NOTHING_APPENDED, Appended, BlockTable, PrefixMatch
from quire.protocol.cache import CacheLayout
from quire.protocol.step import DiskNews, Moves


class KVManager:
    """Hands out the blocks of each group's pool. All costs are O(1) per sequence and step, O(blocks) at admission.

    Calls that take blocks belong to the plan that `end_plan` completes; `commit` comes with a result. Several plans
    may be under way: workers carry them out in order, so a block that is free here may be written by a later plan
    while an earlier one still reads it.

    Attributes:
        block_size: tokens in a block.
        num_blocks: by group.
        windows: by group, in tokens; None: full attention.
        pools: by group.
        events: what happened to cached blocks, where that is kept; whoever publishes takes it out.
        pins: prefixes that are never evicted.
        space: the second memory, where there are host blocks; disk: the files below it, where blocks are kept there.
        times: how long contents stay in their blocks; its `now` is to be set once a step.
        settled: blocks that were watched, and were computed or given up since; whoever watches takes them out.
    """

    def __init__(
        self,
        layout: CacheLayout,
        enable_prefix_caching: bool = True,
        keeps_events: bool = False,
        stored: Sequence[Sequence[bytes]] | None = None,
    ) -> None:
        """`stored`: the names of blocks on the disk, by group; None without such a tier, which needs host blocks."""
        size = self.block_size = layout.block_size
        self.num_blocks = list(layout.num_blocks)
        self.windows = [group.window for group in layout.groups]
        self.times = ResidencyTimes()
        kinds = zip(self.num_blocks, self.windows, strict=True)
        self._groups = [KVGroup(count, size, window, self.times) for count, window in kinds]
        self.pools = [group.pool for group in self._groups]
        self._windowed = [number for number, group in enumerate(self._groups) if group.window is not None]
        self._caching = enable_prefix_caching
        self._hash = BlockHasher(size)
        self._tables: dict[int, BlockTable] = {}  # those that hold blocks
        self._computing: dict[bytes, int] = {}  # block hash -> the running sequence that will compute it
        self._watched: set[bytes] = set()  # those of them that somebody awaits
        self.settled: list[bytes] = []
        self._copies = PlannedCopies(self.pools)  # of the plan being made
        longest = min(layout.max_model_len, self.max_tokens_ever())
        self.events = KVEventLog(self._groups) if keeps_events else None
        self.pins = Pins(self._groups, self._hash if enable_prefix_caching else None, longest)
        self.space: SwapSpace | None = None
        if layout.num_host_blocks:
            self.space = SwapSpace(layout, self._groups, stored if enable_prefix_caching else None)
        self.disk = self.space.disk if self.space is not None else None

    # What there is.

    @property
    def num_free_blocks(self) -> list[int]:
        """By group: blocks that can be taken, those that still hold a cached prefix included."""
        return [pool.num_free for pool in self.pools]

    @property
    def usage(self) -> float:
        """Share of the blocks that running sequences hold, 0 to 1, of the fullest group."""
        return max(1.0 - pool.num_free / pool.num_blocks for pool in self.pools)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks of a full-attention group that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def max_tokens_ever(self) -> int:
        """Tokens of the longest sequence that can run by itself; sys.maxsize where windows alone are kept."""
        return min(group.max_tokens() for group in self._groups)

    def num_blocks_together(self, num_shared: int, num_tokens: int, num_sequences: int) -> tuple[int, int]:
        """Blocks that sequences of so many tokens need at most, which share the first ones, and those that there are.

        Of the group that lacks most.
        """
        num_full, num_each = num_shared // self.block_size, self.num_blocks_for(num_tokens)
        found: list[tuple[int, int]] = []
        for group in self._groups:
            num_held = num_each - num_full
            if group.window is not None:  # none is shared for long; one block more for the step's token
                num_full = 0
                num_held = min(num_each, self.num_blocks_for(window_reach(group.window, self.block_size)) + 1)
            found.append((num_full + num_sequences * num_held, group.pool.num_blocks - len(group.pinned)))
        return max(found, key=lambda numbers: numbers[0] - numbers[1])

    # Sequences come.

    def open(
        self, sequence_id: int, prompt_token_ids: list[int], output_token_ids: list[int], root: bytes
    ) -> BlockTable:
        """An empty table for a new sequence; `root` is its request's `root_hash`."""
        return BlockTable(sequence_id, prompt_token_ids, output_token_ids, root, len(self._groups))

    def match_prefix(self, table: BlockTable) -> PrefixMatch:
        """The longest cached prefix in full blocks, never reaching the last token: that one must be computed.

        What was swapped out of the sequence counts where it is longer. The blocks are not taken, so the match holds
        until other blocks are.
        """
        if not self._caching:
            return self.match_swapped(table)
        limit = (table.num_tokens - 1) // self.block_size
        num_found = longest_prefix(self._groups, lambda index: self._hash_of(table, index), limit)
        awaits = self._last_on_its_way(table, num_found, limit)
        num_tokens = num_found * self.block_size
        if self.space is not None and awaits is None:
            num_known = self.space.longest_known(lambda index: self._hash_of(table, index), limit) * self.block_size
            num_tokens = max(num_known, table.swapped.num_tokens if table.swapped else 0)
        return self._match(table, num_tokens, awaits)

    def watch(self, name: bytes) -> None:
        """Have a match's `awaits`, or what `fetch` said, told in `settled` as soon as nobody brings it any more."""
        if name in self._computing:
            self._watched.add(name)
        else:
            assert self.disk is not None, "nobody brings what is to be watched"

    def fetch(self, table: BlockTable, match: PrefixMatch) -> bytes | None:
        """Have the disk bring what it has of a prefix after a match; returns a name to `watch`, if there is any."""
        if self.space is None or match.is_swapped:
            return None
        limit = (table.num_tokens - 1) // self.block_size
        num_known = match.num_tokens // self.block_size
        return self.space.fetch(table, lambda index: self._hash_of(table, index), num_known, limit)

    def match_swapped(self, table: BlockTable) -> PrefixMatch:
        """As `match_prefix`, of what was swapped out of the sequence alone."""
        return NO_MATCH if table.swapped is None else self._match(table, table.swapped.num_tokens)

    def shortage(self, table: BlockTable, match: PrefixMatch, num_new_tokens: int, spares: bool = False) -> int:
        """Blocks missing to admit a sequence whose first step computes so many tokens; zero or less when it fits.

        Of the group that lacks most. Full groups are asked for all known tokens, windowed ones for the first step's.
        `spares`: each group is to keep one block in a hundred free.
        """
        missing = -sys.maxsize
        for number, group in enumerate(self._groups):
            found = match.block_ids[number] if match.block_ids else []
            num_fresh = group.num_admitted(table.num_tokens, match.num_tokens + num_new_tokens) - len(found)
            num_free_hits = group.num_free_among(found[group.first_visible(match.num_tokens) :])
            num_fresh += match.num_from_host and sum(block < 0 for block in found)
            num_spare = group.pool.num_blocks // 100 if spares else 0
            missing = max(missing, num_fresh + num_free_hits + num_spare - group.pool.num_free)
        return missing

    def allocate(self, table: BlockTable, match: PrefixMatch, num_new_tokens: int) -> None:
        """Give an empty table blocks, the matched ones first. There must be no shortage."""
        assert not any(table.block_ids), "the table holds blocks already"
        for number, group in enumerate(self._groups):
            found = match.block_ids[number] if match.block_ids else []
            first = table.first_block[number] = group.first_visible(match.num_tokens)
            for block in found[first:]:
                if block >= 0:
                    group.pool.acquire(block)
            num_fresh = group.num_admitted(table.num_tokens, match.num_tokens + num_new_tokens) - len(found)
            if match.num_from_host and self.space is not None:
                found = self.space.bring_in(table, number, found, match.is_swapped)
            table.block_ids[number] = found + group.pool.allocate(num_fresh)
        table.num_committed = table.num_found = match.num_tokens // self.block_size
        if match.num_from_host:  # those that are brought in can be found when the result of this plan is there
            table.num_committed = min(table.num_found, first_from_host(match))
        self.drop_swapped(table)
        self._start(table)
        if self._caching:
            for index in range(table.num_committed, table.num_tokens // self.block_size):
                self._computing.setdefault(self._hash_of(table, index), table.sequence_id)

    def fork(self, table: BlockTable, sequence_id: int, output_token_ids: list[int], num_tokens: int) -> BlockTable:
        """A table for a sequence that shares the first num_tokens tokens, and their blocks, with another."""
        child = BlockTable(sequence_id, table.prompt_token_ids, output_token_ids, table.root, len(self._groups))
        num_blocks, num_full = self.num_blocks_for(num_tokens), num_tokens // self.block_size
        for number, group in enumerate(self._groups):
            first = child.first_block[number] = table.first_block[number]
            assert first <= group.first_visible(num_tokens), "a window has left behind what a fork must see"
            child.block_ids[number] = table.block_ids[number][:num_blocks]
            for block in child.block_ids[number][first:]:
                group.pool.acquire(block)
        child.num_committed = min(table.num_committed, num_full)
        child.num_found = min(table.num_found, num_full)
        child.hashes = table.hashes[:num_full]
        if num_full < num_blocks:
            child.shared_block = num_full
            table.shared_block = max(table.shared_block, num_full)  # it writes no earlier block any more
        self._start(child)
        return child

    # A sequence runs.

    def append(self, table: BlockTable, start: int, stop: int) -> Appended | None:
        """Make positions [start, stop) writable: add blocks, and copy the first one if it is shared.

        The copy is part of the plan being made (see `end_plan`), and its source is not handed out again until then.

        Returns:
            What the sequence's row has to know; None, with nothing changed, when some group has too few blocks.
        """
        if stop <= table.num_slots and table.shared_block < 0:
            return NOTHING_APPENDED
        first, num_blocks = start // self.block_size, self.num_blocks_for(stop)
        may_share = first == table.shared_block
        shared: list[int] = []  # groups in which the first block is to be copied
        for number, group in enumerate(self._groups):
            block_ids = table.block_ids[number]
            is_shared = may_share and first < len(block_ids) and self._is_shared(number, block_ids[first])
            if is_shared:
                shared.append(number)
            if max(num_blocks - len(block_ids), 0) + is_shared > group.pool.num_free:
                return None
        if first >= table.shared_block:
            table.shared_block = -1
        edits = [self._copy(table, number, first) for number in shared]
        if stop <= table.num_slots:
            return Appended([], edits) if edits else NOTHING_APPENDED
        return Appended(self._extend(table, num_blocks), edits)

    def commit(self, table: BlockTable, num_computed_tokens: int) -> None:
        """A result came: offer full blocks to the prefix cache, and free what windows have left behind.

        The sequence's tokens must be known up to num_computed_tokens, of which results have come; plans under way may
        be ahead of it.
        """
        if num_computed_tokens < table.next_commit:
            return
        num_full = num_computed_tokens // self.block_size
        if self._caching:
            if self.events is not None:
                self.events.stored(table, table.num_committed, num_full, self._hash_of)
            for index in range(table.num_committed, num_full):
                block_hash = self._hash_of(table, index)
                for number, block_ids in enumerate(table.block_ids):
                    if index >= table.first_block[number]:
                        self.pools[number].register(block_ids[index], block_hash)
                        if self.disk is not None:
                            self.disk.save(number, block_ids[index], block_hash)
                self._forget_computing(table, block_hash)
            table.num_committed = max(table.num_committed, num_full)
        for number in self._windowed:
            group, block_ids, first = self._groups[number], table.block_ids[number], table.first_block[number]
            stop = min(group.first_visible(num_computed_tokens), len(block_ids))
            for index in range(first, stop):  # the oldest first
                group.pool.release(block_ids[index])
                block_ids[index] = 0
            table.first_block[number] = max(first, stop)
        self._set_next_commit(table)

    def free(self, table: BlockTable) -> None:
        """Take all blocks, and copies not yet planned, from a table; what the blocks hold stays findable."""
        del self._tables[table.sequence_id]
        self._copies.drop(table.sequence_id)
        if self.space is not None:
            self.space.arrivals.drop(table.sequence_id)
        for group, block_ids, first in zip(self._groups, table.block_ids, table.first_block, strict=True):
            group.pool.release_all(block_ids[first:])
        for block_hash in table.hashes[table.num_committed :]:
            self._forget_computing(table, block_hash)
        table.clear(len(self._groups))

    # The second memory.

    def swap_out(self, table: BlockTable, num_computed_tokens: int) -> bool:
        """Have the blocks of a table's computed tokens copied to the host, before `free`, if that pays and can be.

        The copies are part of the plan being made. Blocks with a name that the host knows are not copied again.
        """
        space = self.space
        if space is None or self._copies.concern(table.sequence_id) or not space.pays(table, num_computed_tokens):
            return False
        return space.swap_out(table, num_computed_tokens)

    def drop_swapped(self, table: BlockTable) -> None:
        """Give up what the host holds of a sequence."""
        if self.space is not None:
            self.space.drop_swapped(table)

    # A plan is made.

    def end_plan(self) -> Moves:
        """A plan is complete: returns its moves. Copies' sources may be handed out from the next plan on."""
        copies = self._copies.take()
        return Moves(copies=copies) if self.space is None else self.space.end_plan(copies)

    def plan_done(self, disk: DiskNews | None = None) -> None:
        """The result of the oldest plan in flight came, and with it perhaps news of the disk."""
        if self.space is not None:
            self.space.plan_done()
        if self.disk is not None and disk is not None:
            self.settled += self.disk.take(disk)

    def cancel(self) -> None:
        """Plans in flight will not be carried out, and no table holds blocks; what they were to move is forgotten."""
        self._copies.take()
        if self.space is not None:
            self.space.cancel()

    # All at once.

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix, pinned ones too; False, with nothing done, while sequences hold blocks.

        But for those on the disk, as the same tokens will still make the same blocks.
        """
        if self._tables:
            return False
        self.pins.remove_all()
        for pool in self.pools:
            pool.forget_all()
        if self.space is not None:
            self.space.forget_all()
        if self.events is not None:
            self.events.cleared()
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError unless every count and hash is what the live tables imply. O(num_blocks + tokens)."""
        self._copies.check_none()
        for number, group in enumerate(self._groups):
            self._check_group(number, group)
        for table in self._tables.values():
            self._check_table(table)
        if self.space is not None:
            self.space.check_integrity()
        computing = {name for table in self._tables.values() for name in table.hashes[table.num_committed :]}
        assert self._computing.keys() <= computing, "nobody computes a block that is waited for"
        assert set(self._computing.values()) <= self._tables.keys(), "nobody computes a block that is waited for"

    def _check_group(self, number: int, group: KVGroup) -> None:
        group.pool.check_integrity()
        owners = Counter(group.pinned)
        assert all(map(group.pool.is_registered, owners)), "a block is pinned, and nobody can find it"
        for table in self._tables.values():
            where = f"of sequence {table.sequence_id}"
            first, num_known = table.first_block[number], max(table.num_committed, table.num_found)
            held = table.block_ids[number][first:]
            assert not any(table.block_ids[number][:first]), f"a block {where} is kept behind the window"
            owners.update(held)
            for block in held[max(num_known - first, 0) :]:
                assert not group.pool.is_registered(block), f"block {block} {where} is findable before it was computed"
        counts = {block: count for block, count in enumerate(group.pool.ref_counts) if count}
        assert owners == counts, "reference counts are not the numbers of owners"

    def _check_table(self, table: BlockTable) -> None:
        where, size, parent = f"sequence {table.sequence_id}", self.block_size, table.root
        assert all(table.block_ids), f"{where} is kept without blocks"
        assert table.num_slots == min(map(len, table.block_ids)) * size, f"{where} miscounts its positions"
        for index, block_hash in enumerate(table.hashes):
            parent = self._hash(parent, table.tokens(index * size, (index + 1) * size))
            assert block_hash == parent, f"wrong hash of block {index} of {where}"

    def _start(self, table: BlockTable) -> None:
        self._tables[table.sequence_id] = table
        self._set_num_slots(table)
        self._set_next_commit(table)

    def _set_num_slots(self, table: BlockTable) -> None:
        table.num_slots = min(map(len, table.block_ids)) * self.block_size

    def _set_next_commit(self, table: BlockTable) -> None:
        steps = [(table.num_committed + 1) * self.block_size if self._caching else NEVER]
        steps += [self._groups[number].release_at(table.first_block[number]) for number in self._windowed]
        table.next_commit = min(steps)

    def _match(self, table: BlockTable, num_tokens: int, awaits: bytes | None = None) -> PrefixMatch:
        """A match of tokens whose blocks are all on the device or the host.

        What the device still has is shared with whoever uses it; the rest is to be brought in.
        """
        size, space, swapped = self.block_size, self.space, table.swapped
        if swapped is not None and swapped.num_tokens != num_tokens:
            swapped = None
        if self._caching and num_tokens >= size:
            self._hash_of(table, num_tokens // size - 1)
        block_ids: list[list[int]] = []
        for number, group in enumerate(self._groups):
            first, find = group.first_visible(num_tokens), group.pool.find
            names = table.hashes[first : num_tokens // size]
            found = [find(name) for name in names]
            if space is not None:
                found = space.complete(number, names, found, swapped)
            block_ids.append([0] * first + [block for block in found if block is not None])
        num_from_host = sum(block < 0 for found in block_ids for block in found) if space is not None else 0
        return PrefixMatch(num_tokens, block_ids, awaits, num_from_host, swapped is not None and num_from_host > 0)

    def _is_shared(self, number: int, block: int) -> bool:
        """Whether writing to a block would change what another table, or the prefix cache, knows it for."""
        pool = self.pools[number]
        return pool.is_registered(block) or pool.ref_counts[block] - self._copies.num_owned(number, block) > 1

    def _copy(self, table: BlockTable, number: int, index: int) -> tuple[int, int, int]:
        """Replace a shared block by one of the table's own; returns the edit."""
        pool, block_ids = self.pools[number], table.block_ids[number]
        source = block_ids[index]
        (destination,) = pool.allocate(1)
        block_ids[index] = destination
        self._copies.add(table.sequence_id, (number, source, destination))
        return number, index, destination

    def _extend(self, table: BlockTable, num_blocks: int) -> list[list[int]]:
        """Lengthen the lists of all groups to num_blocks; returns what was added."""
        added: list[list[int]] = []
        for group, block_ids in zip(self._groups, table.block_ids, strict=True):
            added.append(group.pool.allocate(max(num_blocks - len(block_ids), 0)))
            block_ids += added[-1]
        self._set_num_slots(table)
        return added

    def _hash_of(self, table: BlockTable, index: int) -> bytes:
        """The name of a sequence's full block; hashes what was not hashed before."""
        hashes, size = table.hashes, self.block_size
        while len(hashes) <= index:
            start = len(hashes) * size
            parent = hashes[-1] if hashes else table.root
            hashes.append(self._hash(parent, table.tokens(start, start + size)))
        return hashes[index]

    def _last_on_its_way(self, table: BlockTable, index: int, limit: int) -> bytes | None:
        """The name of the last block of those, from `index` on, that one running sequence is about to compute."""
        if index >= limit:
            return None
        computing, name = self._computing, self._hash_of(table, index)
        if (sequence_id := computing.get(name)) is None:
            return None
        while index + 1 < limit and computing.get(following := self._hash_of(table, index + 1)) == sequence_id:
            index, name = index + 1, following
        return name

    def _forget_computing(self, table: BlockTable, block_hash: bytes) -> None:
        if self._computing.get(block_hash) == table.sequence_id:
            del self._computing[block_hash]
            if block_hash in self._watched:
                self._watched.remove(block_hash)
                self.settled.append(block_hash)
