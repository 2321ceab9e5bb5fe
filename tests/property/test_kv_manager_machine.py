"""The KV manager as a Hypothesis state machine against a naive twin that neither shares nor caches.

The twin keeps each sequence's tokens apart from all others'. A physical memory of (group, block, slot) is written
through the manager's tables, and must read back as the twin's tokens at every moment, as far as each group's window
shows them, whatever was forked, evicted, found, given back, or swapped to the host's memory and brought in again.
"""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from quire.errors import InvalidRequestError
from quire.kvcache.manager import KVManager
from quire.kvcache.prefix import root_hash
from quire.kvcache.table import BlockTable
from quire.protocol.cache import CacheGroup, CacheLayout
from quire.protocol.step import Moves

Prefix = tuple[str | None, bytes, int]  # salt, a digest of all tokens up to here, and how many: what a slot holds
KEY_TILE = 64
AMPLE = 5000


class Twin:
    """A sequence by itself."""

    def __init__(self, table: BlockTable, salt: str | None, num_computed: int) -> None:
        self.table = table
        self.salt = salt
        self.num_computed = num_computed
        self._content: list[Prefix] = []

    def content(self, start: int, stop: int) -> list[Prefix]:
        tokens = bytes(self.table.tokens(0, stop))
        return [(self.salt, tokens[: position + 1], position) for position in range(start, stop)]


class KVManagerMachine(RuleBasedStateMachine):
    twins = Bundle("twins")

    @initialize(
        windows=st.lists(st.sampled_from([None, 2, 8, 70, 100]), min_size=1, max_size=3, unique=True),
        blocks=st.lists(st.integers(2, 40), min_size=3, max_size=3) | st.just([AMPLE] * 3),
        block_size=st.sampled_from([1, 4, 16, 24]),
        hosts=st.sampled_from([0, 2, 30]),
        caching=st.booleans(),
        longest=st.sampled_from([10, 10_000]),
    )
    def start(
        self,
        windows: list[int | None],
        blocks: list[int],
        block_size: int,
        hosts: int,
        caching: bool,
        longest: int,
    ) -> None:
        counts = blocks[: len(windows)]
        layout = CacheLayout(
            block_size=block_size,
            groups=[CacheGroup([number], window) for number, window in enumerate(windows)],
            num_blocks=counts,
            max_model_len=longest,
            num_host_blocks=[hosts for _ in windows] if hosts else [],
        )
        self.kv = KVManager(layout, caching)
        self.windows = windows
        self.size = block_size
        self.caching = caching
        self.is_ample = blocks[0] == AMPLE
        self.memory: list[dict[tuple[int, int], Prefix]] = [{} for _ in windows]
        self.host: list[dict[tuple[int, int], Prefix]] = [{} for _ in windows]
        self.live: list[Twin] = []
        self.swapped: list[Twin] = []
        self.committed: set[Prefix] = set()  # ends of full blocks ever offered to the cache since the last reset
        self.num_opened = 0
        self.pinned: dict[str, tuple[list[int], str | None]] = {}

    @rule(
        target=twins,
        pattern=st.lists(st.integers(0, 1), min_size=1, max_size=5),
        repeats=st.integers(1, 60),
        num_output=st.integers(0, 3),
        salt=st.sampled_from([None, None, "", "a"]),
        chunk=st.integers(1, 100),
    )
    def admit(self, pattern: list[int], repeats: int, num_output: int, salt: str | None, chunk: int):
        tokens = pattern * repeats
        border = max(1, len(tokens) - num_output)
        table = self.kv.open(self._new_id(), tokens[:border], tokens[border:], root_hash(salt))
        match = self.kv.match_prefix(table)
        num_hit = match.num_tokens
        assert num_hit < len(tokens)
        assert num_hit % self.size == 0
        twin = Twin(table, salt, num_hit)
        for group, found in enumerate(match.block_ids):
            first = self._first_visible(group, num_hit)
            assert len(found) == num_hit // self.size
            assert not any(found[: first // self.size])
            seen = self._read(group, found, first, num_hit)
            assert seen == twin.content(first, num_hit), "another's keys and values"
        if self.is_ample and self.caching:  # nothing was ever evicted: the match must be complete
            ends = twin.content(0, len(tokens) - 1)[self.size - 1 :: self.size]
            known = [end in self.committed for end in ends]
            assert num_hit == self.size * (known.index(False) if False in known else len(known))
        num_new = min(chunk, len(tokens) - num_hit)
        if self.kv.shortage(table, match, num_new) > 0:
            assert not self.is_ample
            return multiple()
        self.kv.allocate(table, match, num_new)
        self._carry_out(self.kv.end_plan())
        self.live.append(twin)
        self._compute(twin, num_new)
        return twin

    @rule(twin=twins, count=st.integers(1, 100))
    def compute_chunk(self, twin: Twin, count: int) -> None:
        """More of the tokens that are known already."""
        count = min(count, twin.table.num_tokens - twin.num_computed)
        if count and twin in self.live and self._append(twin, twin.num_computed + count):
            self._compute(twin, count)

    @rule(twin=twins, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6), num_accepted=st.integers(0, 6))
    def decode(self, twin: Twin, tokens: list[int], num_accepted: int) -> None:
        """The last token with some drafts, of which not all are accepted."""
        if twin not in self.live or twin.num_computed + 1 < twin.table.num_tokens:
            return
        if twin.num_computed == twin.table.num_tokens:
            twin.table.output_token_ids.append(tokens[0])
        start = twin.num_computed
        if not self._append(twin, start + len(tokens)):
            return
        num_accepted = min(num_accepted, len(tokens) - 1)
        for group, block_ids in enumerate(twin.table.block_ids):  # drafts that are refused leave rubbish
            for position in range(start, start + len(tokens)):
                self.memory[group][block_ids[position // self.size], position % self.size] = ("rubbish", b"", 0)
        twin.table.output_token_ids.extend(tokens[1 : num_accepted + 1])
        self._compute(twin, 1 + num_accepted)

    @rule(target=twins, twin=twins)
    def fork(self, twin: Twin):
        border = len(twin.table.prompt_token_ids)
        if twin not in self.live or twin.num_computed < border:
            return multiple()
        free_before = self.kv.num_free_blocks
        output = twin.table.tokens(border, twin.num_computed)
        child = self.kv.fork(twin.table, self._new_id(), output, twin.num_computed)
        assert self.kv.num_free_blocks == free_before, "a fork takes no block"
        fork = Twin(child, twin.salt, twin.num_computed)
        self.live.append(fork)
        return fork

    @rule(steps=st.lists(st.tuples(twins, st.integers(1, 40)), max_size=4))
    def start_anew(self, steps: list[tuple[Twin, int]]) -> None:
        """A plan is made and never carried out: whatever runs loses its blocks."""
        for twin, count in steps:
            if twin in self.live:
                self.kv.append(twin.table, twin.num_computed, twin.num_computed + count)
        for twin in self.live:
            self.kv.free(twin.table)
            twin.num_computed = 0
        self.kv.cancel()
        self.swapped.clear()
        idle = [count - pinned for count, pinned in zip(self.kv.num_blocks, self.kv.pins.num_blocks, strict=True)]
        assert self.kv.num_free_blocks == idle
        for twin in list(self.live):
            match = self.kv.match_prefix(twin.table)
            if self.kv.shortage(twin.table, match, 1) <= 0:
                twin.num_computed = match.num_tokens
                self.kv.allocate(twin.table, match, 1)
                self._carry_out(self.kv.end_plan())
            else:
                self.live.remove(twin)

    @rule(twin=twins)
    def swap_out(self, twin: Twin) -> None:
        """A sequence is preempted; where the host has no room, it is as if it had never run."""
        if twin not in self.live:
            return
        done = self.kv.swap_out(twin.table, twin.num_computed)
        assert done == (twin.table.swapped is not None)
        self.kv.free(twin.table)
        self._carry_out(self.kv.end_plan())
        self.live.remove(twin)
        if done:
            self.swapped.append(twin)

    @rule(twin=twins)
    def bring_in(self, twin: Twin) -> None:
        """It runs again, and has lost nothing."""
        if twin not in self.swapped:
            return
        match = self.kv.match_prefix(twin.table)
        assert match.num_tokens >= twin.num_computed or match.awaits is not None
        if match.num_tokens < twin.table.num_tokens and self.kv.shortage(twin.table, match, 1) <= 0:
            twin.num_computed = match.num_tokens
            self.kv.allocate(twin.table, match, 1)
            self._carry_out(self.kv.end_plan())
            assert twin.table.swapped is None
            self.swapped.remove(twin)
            self.live.append(twin)

    @rule(twin=consumes(twins))
    def free(self, twin: Twin) -> None:
        if twin in self.swapped:
            self.kv.drop_swapped(twin.table)
            self.swapped.remove(twin)
        elif twin in self.live:
            self.kv.free(twin.table)
            self.live.remove(twin)
            assert not any(twin.table.block_ids)

    @rule()
    def reset_prefix_cache(self) -> None:
        done = self.kv.reset_prefix_cache()
        assert done == (not self.live)
        if done:
            self.committed.clear()
            self.pinned.clear()

    @rule(twin=twins, name=st.sampled_from("abc"))
    def pin(self, twin: Twin, name: str) -> None:
        tokens, fits_before = twin.table.tokens(0, twin.table.num_tokens), self.kv.max_tokens_ever()
        try:
            prefix = self.kv.pins.add(name, tokens, twin.salt)
        except InvalidRequestError:
            assert self.kv.max_tokens_ever() == fits_before
            return
        assert name not in self.pinned
        assert prefix.num_tokens == len(tokens) // self.size * self.size
        self.pinned[name] = (tokens[: prefix.num_tokens], twin.salt)

    @rule(name=st.sampled_from("abc"))
    def unpin(self, name: str) -> None:
        assert self.kv.pins.remove(name) == (self.pinned.pop(name, None) is not None)

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity()
        for group, num_blocks in enumerate(self.kv.num_blocks):
            held = {block for twin in self.live for block in self._held(twin.table, group)}
            assert self.kv.num_free_blocks[group] == num_blocks - len(held | self.kv._groups[group].pinned.keys())
        for tokens, salt in self.pinned.values():
            reader = self.kv.open(-1, [*tokens, 0], [], root_hash(salt))
            assert self.kv.match_prefix(reader).num_tokens == len(tokens), "a pinned prefix was evicted"
        shares = [1 - free / count for free, count in zip(self.kv.num_free_blocks, self.kv.num_blocks, strict=True)]
        assert self.kv.usage == max(shares)
        for twin in self.live:
            for group, block_ids in enumerate(twin.table.block_ids):
                first = self._first_visible(group, twin.num_computed)
                assert twin.table.first_block[group] == first // self.size, "a window keeps what it shows, and no more"
                seen = self._read(group, block_ids, first, twin.num_computed)
                assert seen == twin.content(first, twin.num_computed)
        assert (set(self.kv.space.swapped) if self.kv.space else set()) == {
            twin.table.sequence_id for twin in self.swapped
        }
        for twin in self.swapped:
            assert twin.table.swapped is not None
            for group, held in enumerate(twin.table.swapped.block_ids):
                first = self._first_visible(group, twin.num_computed)
                found = [0] * (first // self.size) + [-1 - block for block in held]
                seen = self._read(group, found, first, twin.num_computed)
                assert seen == twin.content(first, twin.num_computed), "the host has lost something"

    def _first_visible(self, group: int, num_computed: int) -> int:
        """The first position whose block is kept."""
        window = self.windows[group]
        if window is None:
            return 0
        return max(num_computed - window + 1, 0) // KEY_TILE * KEY_TILE // self.size * self.size

    def _held(self, table: BlockTable, group: int) -> list[int]:
        return table.block_ids[group][table.first_block[group] :]

    def _new_id(self) -> int:
        self.num_opened += 1
        return self.num_opened

    def _read(self, group: int, block_ids: list[int], start: int, stop: int) -> list[Prefix | None]:
        """What slots hold; a block below zero is one of the host, -1 - block."""
        found: list[Prefix | None] = []
        for position in range(start, stop):
            block, slot = block_ids[position // self.size], position % self.size
            found.append(
                self.memory[group].get((block, slot)) if block >= 0 else self.host[group].get((-1 - block, slot))
            )
        return found

    def _append(self, twin: Twin, stop: int) -> bool:
        """Blocks for the positions up to `stop`, as a row is told of them; whether there were enough."""
        free_before, rows = self.kv.num_free_blocks, [block_ids.copy() for block_ids in twin.table.block_ids]
        appended = self.kv.append(twin.table, twin.num_computed, stop)
        if appended is None:
            assert not self.is_ample
            assert twin.table.block_ids == rows
            assert self.kv.num_free_blocks == free_before
            return False
        num_taken = [0] * len(rows)
        moves = self.kv.end_plan()
        for group, source, _ in moves.copies:
            num_taken[group] += 1
            assert source in rows[group]
        self._carry_out(moves)
        for group, index, block in appended.edits:
            rows[group][index] = block
        for group, fresh in enumerate(appended.new_block_ids):
            rows[group] += fresh
            num_taken[group] += len(fresh)
        for group, row in enumerate(rows):
            assert row == twin.table.block_ids[group], "the row can't follow the table"
            assert free_before[group] - self.kv.num_free_blocks[group] == num_taken[group]
        return True

    def _carry_out(self, moves: Moves) -> None:
        """Move whole blocks: out, within the device, in; each list reads before it writes."""
        for part, sources, destinations in (
            (moves.out, self.memory, self.host),
            (moves.copies, self.memory, self.memory),
            (moves.in_, self.host, self.memory),
        ):
            read = [[sources[group].get((block, slot)) for slot in range(self.size)] for group, block, _ in part]
            for (group, _, block), content in zip(part, read, strict=True):
                for slot, prefix in enumerate(content):
                    destinations[group].pop((block, slot), None)
                    if prefix is not None:
                        destinations[group][block, slot] = prefix
        self.kv.plan_done()

    def _compute(self, twin: Twin, count: int) -> None:
        """Carry out a step: write the slots, then commit."""
        start, stop = twin.num_computed, twin.num_computed + count
        content = twin.content(start, stop)
        for group, block_ids in enumerate(twin.table.block_ids):
            for position, prefix in zip(range(start, stop), content, strict=True):
                self.memory[group][block_ids[position // self.size], position % self.size] = prefix
        twin.num_computed = stop
        self.kv.commit(twin.table, stop)
        if self.caching:
            self.committed.update(prefix for prefix in content if (prefix[2] + 1) % self.size == 0)


TestKVManagerMachine = KVManagerMachine.TestCase
TestKVManagerMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
