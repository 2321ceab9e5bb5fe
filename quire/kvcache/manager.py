"""The KV manager: block tables of running sequences, prefix sharing, forks and copy-on-write.

The scheduler is its only caller: it opens a table per sequence, asks for blocks before a step and commits what the
step computed. The manager sees token ids to name prefixes by, and never a tensor, a queue or a policy.
"""

from typing import NamedTuple

from quire.config.cache import CacheConfig
from quire.kvcache.pool import BlockPool
from quire.kvcache.prefix import BlockHasher, root_hash
from quire.protocol.step import BlockCopy


class BlockTable:
    """The blocks of one sequence: block i holds the keys and values of tokens [i * block_size, (i + 1) * block_size).

    Attributes:
        sequence_id: whose table it is.
        prompt_token_ids, output_token_ids: the sequence's own lists, read here and never changed.
        block_ids: empty while the sequence does not run.
        hashes: names of the sequence's first full blocks, as far as they were needed; kept when blocks are freed.
        num_committed: full blocks that were computed, or found, and offered to the prefix cache.
    """

    __slots__ = (
        "block_ids",
        "hashes",
        "num_committed",
        "output_token_ids",
        "prompt_token_ids",
        "root",
        "sequence_id",
    )

    def __init__(self, sequence_id: int, prompt_token_ids: list[int], output_token_ids: list[int], root: bytes) -> None:
        self.sequence_id = sequence_id
        self.prompt_token_ids = prompt_token_ids
        self.output_token_ids = output_token_ids
        self.root = root
        self.block_ids: list[int] = []
        self.hashes: list[bytes] = []
        self.num_committed = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions [start, stop)."""
        border = len(self.prompt_token_ids)
        if stop <= border:
            return self.prompt_token_ids[start:stop]
        if start >= border:
            return self.output_token_ids[start - border : stop - border]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - border]


class PrefixMatch(NamedTuple):
    """What the cache knows of a sequence's beginning: its first blocks, and whether the next one is on its way."""

    block_ids: list[int]
    next_is_computing: bool  # a running sequence is about to compute the first block that is missing


NO_MATCH = PrefixMatch([], False)


class KVManager:
    """Hands out the blocks of one pool. All costs are O(1) per sequence and step, and O(blocks) at admission."""

    def __init__(self, config: CacheConfig) -> None:
        self.block_size = config.block_size
        self.num_blocks = config.num_blocks
        self._caching = config.enable_prefix_caching
        self._pool = BlockPool(config.num_blocks)
        self._hash = BlockHasher(config.block_size)
        self._tables: dict[int, BlockTable] = {}  # those that hold blocks
        self._computing: dict[bytes, int] = {}  # block hash -> the running sequence that will compute it
        self._copies: list[BlockCopy] = []  # of the plan being made
        self._held: list[int] = []  # sources of those that nobody owns any more, to be freed when the plan is complete

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken, those that still hold a cached prefix included."""
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """Share of the blocks that running sequences hold, 0 to 1."""
        return 1.0 - self._pool.num_free / self.num_blocks

    def block_states(self) -> bytes:
        """One byte a block: 0 free, 1 free but holding a cached prefix, 2 used."""
        return self._pool.states()

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def open(
        self, sequence_id: int, prompt_token_ids: list[int], output_token_ids: list[int], cache_salt: str | None
    ) -> BlockTable:
        """An empty table for a new sequence."""
        return BlockTable(sequence_id, prompt_token_ids, output_token_ids, root_hash(cache_salt))

    def match_prefix(self, table: BlockTable) -> PrefixMatch:
        """The longest cached prefix in full blocks, never reaching the last token: that one must be computed.

        The blocks stay valid until anything is allocated.
        """
        found: list[int] = []
        if not self._caching:
            return NO_MATCH
        for index in range((table.num_tokens - 1) // self.block_size):
            block_hash = self._hash_of(table, index)
            block = self._pool.find(block_hash)
            if block is None:
                return PrefixMatch(found, block_hash in self._computing)
            found.append(block)
        return PrefixMatch(found, False)

    def shortage(self, table: BlockTable, match: PrefixMatch) -> int:
        """Blocks missing to allocate all of a sequence's tokens; zero or less when they fit."""
        num_free_hits = sum(1 for block in match.block_ids if self._pool.ref_counts[block] == 0)
        num_fresh = self.num_blocks_for(table.num_tokens) - len(match.block_ids)
        return num_fresh + num_free_hits - self._pool.num_free

    def allocate(self, table: BlockTable, match: PrefixMatch) -> None:
        """Give an empty table blocks for all its tokens, the matched ones first. There must be no shortage."""
        assert not table.block_ids, "the table holds blocks already"
        for block in match.block_ids:
            self._pool.acquire(block)
        num_fresh = self.num_blocks_for(table.num_tokens) - len(match.block_ids)
        table.block_ids = match.block_ids + self._pool.allocate(num_fresh)
        table.num_committed = len(match.block_ids)
        self._tables[table.sequence_id] = table
        if self._caching:
            for index in range(table.num_committed, table.num_tokens // self.block_size):
                self._computing.setdefault(self._hash_of(table, index), table.sequence_id)

    def append(self, table: BlockTable, start: int, stop: int) -> list[int] | None:
        """Make positions [start, stop) writable: add blocks, and copy the first one if it is shared.

        The copy is part of the plan being made (see `end_plan`), and its source is not handed out again until then.

        Returns:
            The blocks added to the table's end; None, with nothing changed, when there are too few.
        """
        block_ids, pool = table.block_ids, self._pool
        first = start // self.block_size
        num_fresh = -(-stop // self.block_size) - len(block_ids)
        shared = first < len(block_ids) and pool.ref_counts[block_ids[first]] > 1
        if num_fresh <= 0 and not shared:
            return []
        num_fresh = max(num_fresh, 0)
        if num_fresh + shared > pool.num_free:
            return None
        if shared:
            source = block_ids[first]
            (destination,) = pool.allocate(1)
            block_ids[first] = destination
            pool.release(source)
            self._copies.append(BlockCopy(table.sequence_id, first, source, destination))
        fresh = pool.allocate(num_fresh)
        block_ids.extend(fresh)
        return fresh

    def commit(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Offer full blocks to the prefix cache, once the step that computed them was executed."""
        num_full = num_computed_tokens // self.block_size
        if num_full <= table.num_committed or not self._caching:
            return
        for index in range(table.num_committed, num_full):
            block_hash = self._hash_of(table, index)
            self._pool.register(table.block_ids[index], block_hash)
            self._forget_computing(table, block_hash)
        table.num_committed = num_full

    def fork(
        self, table: BlockTable, sequence_id: int, output_token_ids: list[int], num_computed_tokens: int
    ) -> BlockTable:
        """A table for a sequence that shares the first num_computed_tokens tokens, and their blocks, with another."""
        child = BlockTable(sequence_id, table.prompt_token_ids, output_token_ids, table.root)
        child.block_ids = table.block_ids[: self.num_blocks_for(num_computed_tokens)]
        for block in child.block_ids:
            self._pool.acquire(block)
        child.num_committed = min(table.num_committed, num_computed_tokens // self.block_size)
        child.hashes = table.hashes[: num_computed_tokens // self.block_size]
        self._tables[sequence_id] = child
        return child

    def free(self, table: BlockTable) -> None:
        """Take all blocks, and copies not yet planned, from a table; what the blocks hold stays findable.

        The blocks are freed from the last to the first, so that a sequence's end is evicted before its beginning.
        """
        del self._tables[table.sequence_id]
        self._copies = [copy for copy in self._copies if copy.sequence_id != table.sequence_id]
        sources = {copy.source for copy in self._copies}
        for block in reversed(table.block_ids):
            if block in sources and self._pool.ref_counts[block] == 1:
                self._held.append(block)
            else:
                self._pool.release(block)
        for block in [block for block in self._held if block not in sources]:
            self._held.remove(block)
            self._pool.release(block)
        for block_hash in table.hashes[table.num_committed :]:
            self._forget_computing(table, block_hash)
        table.block_ids = []
        table.num_committed = 0

    def end_plan(self) -> list[BlockCopy]:
        """A plan is complete: returns its copies, whose sources may be handed out from the next plan on."""
        copies, self._copies = self._copies, []
        while self._held:
            self._pool.release(self._held.pop())
        return copies

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False, with nothing done, while sequences hold blocks."""
        if self._tables:
            return False
        self._pool.forget_all()
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError unless every count and hash is what the live tables imply. O(num_blocks + tokens)."""
        self._pool.check_integrity()
        assert not self._copies, "a plan was left incomplete"
        assert not self._held, "a plan was left incomplete"
        counts = [0] * self.num_blocks
        computing: set[bytes] = set()
        for table in self._tables.values():
            assert table.block_ids, f"sequence {table.sequence_id} is kept without blocks"
            for index, block in enumerate(table.block_ids):
                counts[block] += 1
                assert index < table.num_committed or not self._pool.is_registered(block), (
                    f"block {block} of sequence {table.sequence_id} is findable before it was computed"
                )
            parent = table.root
            for index, block_hash in enumerate(table.hashes):
                span = table.tokens(index * self.block_size, (index + 1) * self.block_size)
                parent = self._hash(parent, span)
                assert block_hash == parent, f"wrong hash of block {index} of sequence {table.sequence_id}"
            computing.update(table.hashes[table.num_committed :])
        assert counts == self._pool.ref_counts, "reference counts are not the numbers of owners"
        assert self._computing.keys() <= computing, "nobody computes a block that is waited for"
        assert set(self._computing.values()) <= self._tables.keys(), "nobody computes a block that is waited for"

    def _hash_of(self, table: BlockTable, index: int) -> bytes:
        """The name of a sequence's full block; hashes what was not hashed before."""
        hashes, size = table.hashes, self.block_size
        while len(hashes) <= index:
            start = len(hashes) * size
            parent = hashes[-1] if hashes else table.root
            hashes.append(self._hash(parent, table.tokens(start, start + size)))
        return hashes[index]

    def _forget_computing(self, table: BlockTable, block_hash: bytes) -> None:
        if self._computing.get(block_hash) == table.sequence_id:
            del self._computing[block_hash]
