"""How long contents stay, counted for the blocks that are sampled."""

from quire.kvcache.pool import BlockPool
from quire.kvcache.residency import ResidencyTimes

A = b"a" * 32


def test_times_from_storing_over_uses_to_eviction() -> None:
    times = ResidencyTimes()
    pool = BlockPool(1, times)  # block 0 is one of the sampled ones
    assert times.counts() == []
    times.now = 100.0
    (block,) = pool.allocate(1)
    pool.register(block, A)
    times.now = 101.0
    pool.release(block)
    times.now = 111.0
    pool.acquire(block)
    pool.release(block)
    times.now = 131.0
    pool.allocate(1)
    lifetime, idle, reuse_gap = times.counts()
    assert (lifetime.total, sum(lifetime.counts)) == (31.0, 1)
    assert (idle.total, sum(idle.counts)) == (20.0, 1)
    assert (reuse_gap.total, sum(reuse_gap.counts)) == (10.0, 1)
    pool.release(block)
    times.now = 200.0
    pool.allocate(1)
    assert times.counts() == [lifetime, idle, reuse_gap], "a block without known content has no such times"


def test_forgotten_contents_and_other_blocks_are_not_counted() -> None:
    times = ResidencyTimes()
    pool = BlockPool(2, times)
    times.now = 1.0
    blocks = pool.allocate(2)
    pool.register(blocks[0], A)
    pool.register(blocks[1], b"b" * 32)
    for block in blocks:
        pool.release(block)
    times.now = 2.0
    pool.acquire(1)  # not sampled
    pool.release(1)
    pool.forget_all()
    pool.allocate(2)
    assert times.counts() == []
