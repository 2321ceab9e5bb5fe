"""The KV manager as a Hypothesis state machine against a naive twin that neither shares nor caches.

The twin keeps each sequence's tokens apart from all others'. A physical memory of (block, slot) is written through the
manager's tables, and must read back as the twin's tokens at every moment, whatever was forked, evicted or found.
"""

from collections.abc import Iterator

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from quire.config.cache import CacheConfig
from quire.kvcache.manager import BlockTable, KVManager

Prefix = tuple[str | None, tuple[int, ...]]  # salt and tokens: what a slot holds


class Twin:
    """A sequence by itself."""

    def __init__(self, table: BlockTable, salt: str | None, num_computed: int) -> None:
        self.table = table
        self.salt = salt
        self.num_computed = num_computed

    def content(self) -> Iterator[Prefix]:
        tokens = tuple(self.table.tokens(0, self.table.num_tokens))
        return ((self.salt, tokens[: position + 1]) for position in range(len(tokens)))


class KVManagerMachine(RuleBasedStateMachine):
    twins = Bundle("twins")

    @initialize(
        num_blocks=st.integers(2, 12) | st.just(1000), block_size=st.sampled_from([1, 2, 4]), caching=st.booleans()
    )
    def start(self, num_blocks: int, block_size: int, caching: bool) -> None:
        self.kv = KVManager(CacheConfig(num_blocks, block_size, caching))
        self.size = block_size
        self.caching = caching
        self.memory: list[list[Prefix | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.live: list[Twin] = []
        self.committed: set[Prefix] = set()  # full blocks ever offered to the cache since the last reset
        self.num_opened = 0

    @rule(
        target=twins,
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        num_output=st.integers(0, 3),
        salt=st.sampled_from([None, None, "", "a"]),
    )
    def admit(self, tokens: list[int], num_output: int, salt: str | None):
        border = max(1, len(tokens) - num_output)
        table = self.kv.open(self._new_id(), tokens[:border], tokens[border:], salt)
        match = self.kv.match_prefix(table)
        num_hit = len(match.block_ids) * self.size
        assert num_hit < len(tokens)
        twin = Twin(table, salt, num_hit)
        wanted = list(twin.content())
        found = [slot for block in match.block_ids for slot in self.memory[block]]
        assert found == wanted[:num_hit], "the cache found another's keys and values"
        if self.kv.num_blocks == 1000:  # nothing was ever evicted: the match must be complete
            num_known = 0
            while num_known + self.size < len(tokens) and wanted[num_known + self.size - 1] in self.committed:
                num_known += self.size
            assert num_hit == num_known
        if self.kv.shortage(table, match) > 0:
            assert self.kv.num_free_blocks < self.kv.num_blocks_for(len(tokens))
            return multiple()
        self.kv.allocate(table, match)
        self.live.append(twin)
        return twin

    @rule(twin=twins, count=st.integers(1, 5))
    def compute_prompt(self, twin: Twin, count: int) -> None:
        """A chunk of tokens that admission allocated blocks for."""
        count = min(count, twin.table.num_tokens - twin.num_computed)
        self._write(twin, count)
        self.kv.commit(twin.table, twin.num_computed)
        self._remember(twin)

    @rule(twin=twins, token=st.integers(0, 1))
    def append(self, twin: Twin, token: int) -> None:
        if twin.num_computed < twin.table.num_tokens:
            return
        twin.table.output_token_ids.append(token)
        free_before, blocks_before = self.kv.num_free_blocks, list(twin.table.block_ids)
        fresh = self.kv.append(twin.table, twin.num_computed, twin.num_computed + 1)
        if fresh is None:
            assert free_before == 0
            assert twin.table.block_ids == blocks_before
            twin.table.output_token_ids.pop()
            return
        copies = self.kv.end_plan()
        for copy in copies:
            assert copy.sequence_id == twin.table.sequence_id
            assert blocks_before[copy.block_index] == copy.source
            assert twin.table.block_ids[copy.block_index] == copy.destination
            self.memory[copy.destination] = self.memory[copy.source].copy()
        assert free_before - self.kv.num_free_blocks == len(fresh) + len(copies)
        self._write(twin, 1)
        self.kv.commit(twin.table, twin.num_computed)
        self._remember(twin)

    @rule(target=twins, twin=twins)
    def fork(self, twin: Twin):
        if not twin.num_computed:
            return multiple()
        free_before = self.kv.num_free_blocks
        border = len(twin.table.prompt_token_ids)
        if twin.num_computed < border:
            return multiple()
        output = twin.table.tokens(border, twin.num_computed)
        child = self.kv.fork(twin.table, self._new_id(), output, twin.num_computed)
        assert self.kv.num_free_blocks == free_before, "a fork takes no block"
        fork = Twin(child, twin.salt, twin.num_computed)
        self.live.append(fork)
        return fork

    @rule(twin=consumes(twins))
    def free(self, twin: Twin) -> None:
        self.kv.free(twin.table)
        self.live.remove(twin)
        assert twin.table.block_ids == []

    @rule()
    def reset_prefix_cache(self) -> None:
        done = self.kv.reset_prefix_cache()
        assert done == (not self.live)
        if done:
            self.committed.clear()

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity()
        held = {block for twin in self.live for block in twin.table.block_ids}
        assert self.kv.num_free_blocks == self.kv.num_blocks - len(held)
        assert self.kv.usage == 1 - self.kv.num_free_blocks / self.kv.num_blocks
        for twin in self.live:
            seen = [slot for block in twin.table.block_ids for slot in self.memory[block]]
            assert seen[: twin.num_computed] == list(twin.content())[: twin.num_computed]

    def _new_id(self) -> int:
        self.num_opened += 1
        return self.num_opened

    def _write(self, twin: Twin, count: int) -> None:
        content = list(twin.content())
        for position in range(twin.num_computed, twin.num_computed + count):
            self.memory[twin.table.block_ids[position // self.size]][position % self.size] = content[position]
        twin.num_computed += count

    def _remember(self, twin: Twin) -> None:
        if self.caching:
            content = list(twin.content())[: twin.num_computed]
            self.committed.update(content[self.size - 1 :: self.size])


TestKVManagerMachine = KVManagerMachine.TestCase
TestKVManagerMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
