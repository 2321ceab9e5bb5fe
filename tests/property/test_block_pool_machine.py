"""The block pool as a Hypothesis state machine against a naive twin: one plain list of free blocks and two dicts."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.kvcache.pool import BlockPool

NUM_BLOCKS = 6
HASHES = st.integers(0, 4).map(lambda number: bytes([number]) * 32)


class BlockPoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.free = list(range(NUM_BLOCKS))  # the first is handed out first
        self.owners: dict[int, int] = {}
        self.hash_of: dict[int, bytes] = {}

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        count = min(count, len(self.free))
        expected, self.free = self.free[:count], self.free[count:]
        assert self.pool.allocate(count) == expected
        for block in expected:
            self.owners[block] = 1
            self.hash_of.pop(block, None)

    @rule(block_hash=HASHES)
    def find_and_acquire(self, block_hash: bytes) -> None:
        expected = [block for block, held in self.hash_of.items() if held == block_hash]
        block = self.pool.find(block_hash)
        assert [block] == (expected or [None])
        if block is not None:
            self.pool.acquire(block)
            self.owners[block] = self.owners.get(block, 0) + 1
            if block in self.free:
                self.free.remove(block)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.owners)))
        self.pool.release(block)
        self.owners[block] -= 1
        if not self.owners[block]:
            del self.owners[block]
            self.free.insert(len(self.free) if block in self.hash_of else 0, block)

    @precondition(lambda self: self.owners.keys() - self.hash_of.keys())
    @rule(data=st.data(), block_hash=HASHES)
    def register(self, data: st.DataObject, block_hash: bytes) -> None:
        block = data.draw(st.sampled_from(sorted(self.owners.keys() - self.hash_of.keys())))
        self.pool.register(block, block_hash)
        held = [other for other, held in self.hash_of.items() if held == block_hash]
        if held and held[0] in self.owners:
            return
        for other in held:
            del self.hash_of[other]
            self.free.remove(other)
            self.free.insert(0, other)
        self.hash_of[block] = block_hash

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.hash_of.clear()

    @invariant()
    def consistent(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == len(self.free)
        assert self.pool.ref_counts == [self.owners.get(block, 0) for block in range(NUM_BLOCKS)]
        assert [self.pool.is_registered(block) for block in range(NUM_BLOCKS)] == [
            block in self.hash_of for block in range(NUM_BLOCKS)
        ]


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
