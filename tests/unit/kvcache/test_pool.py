"""The block pool's rules, one by one; `tests/property/test_block_pool_machine.py` tries them in any order."""

import pytest

from quire.kvcache.pool import BlockPool

A, B = b"a" * 32, b"b" * 32


def release_all(pool: BlockPool, blocks: list[int]) -> None:
    for block in blocks:
        pool.release(block)


def test_blocks_are_handed_out_once() -> None:
    pool = BlockPool(4)
    assert sorted(pool.allocate(3) + pool.allocate(1)) == [0, 1, 2, 3]
    assert pool.num_free == 0
    pool.check_integrity()
    with pytest.raises(AssertionError, match="num_free"):
        pool.allocate(1)


def test_a_shared_block_is_free_when_its_last_owner_leaves() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.acquire(block)
    assert pool.num_shared == 1
    pool.release(block)
    assert pool.num_shared == 0
    assert pool.num_free == 1
    pool.release(block)
    assert pool.num_free == 2
    pool.check_integrity()


def test_uncached_blocks_go_first_then_the_least_recently_freed() -> None:
    pool = BlockPool(4)
    first, second, third, fourth = pool.allocate(4)
    pool.register(first, A)
    pool.register(third, B)
    release_all(pool, [third, second, first, fourth])
    assert set(pool.allocate(2)) == {second, fourth}
    assert pool.allocate(2) == [third, first]


def test_content_is_found_until_its_block_is_handed_out_again() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.register(block, A)
    pool.release(block)
    assert pool.find(A) == block
    pool.acquire(block)  # a hit takes it off the free list
    assert pool.num_free == 1
    assert block not in pool.allocate(1)
    pool.release(block)
    assert pool.allocate(1) == [block]
    assert pool.find(A) is None


def test_of_two_blocks_with_equal_content_the_one_in_use_is_known() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.register(first, A)
    pool.register(second, A)
    assert pool.find(A) == first
    assert not pool.is_registered(second)
    pool.release(first)
    pool.register(second, A)  # the other one is free now: the later used takes its place
    assert pool.find(A) == second
    pool.check_integrity()
    assert pool.allocate(1) == [first], "without a hash it goes first"


def test_forget_all() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.register(block, A)
    pool.forget_all()
    assert pool.find(A) is None
    pool.check_integrity()


def test_states_and_evictions() -> None:
    pool = BlockPool(4)
    cached, used, _ = pool.allocate(3)
    pool.register(cached, A)
    pool.register(used, B)
    pool.release(cached)
    assert [pool.states()[block] for block in (cached, used)] == [1, 2]
    assert pool.states().count(0) == 1
    pool.allocate(2)
    assert (pool.num_evicted, set(pool.states())) == (1, {2})
    pool.release(used)
    pool.forget_all()
    assert pool.states()[used] == 0
    pool.allocate(1)
    assert pool.num_evicted == 1, "what nobody could find is not evicted"


def test_a_million_blocks_cost_what_ten_do(count_bytecodes) -> None:
    costs = []
    for num_blocks in (10, 1_000_000):
        pool = BlockPool(num_blocks)

        def use(pool: BlockPool = pool) -> None:
            """A pool's every call, on blocks that are none of the sampled ones."""
            first, second = pool.allocate(2)
            pool.register(first, A)
            pool.register(second, B)
            release_all(pool, [first, second])
            found = pool.find(A)
            assert found is not None
            pool.acquire(found)
            pool.release(found)
            pool.states()

        costs.append(count_bytecodes(use))
    assert costs[0] == costs[1]


def test_check_integrity_sees_a_lost_block_and_a_wrong_count() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    pool.ref_counts[0] = 0
    with pytest.raises(AssertionError):
        pool.check_integrity()
    pool.ref_counts[0] = 1
    pool.check_integrity()
    pool.num_shared += 1
    with pytest.raises(AssertionError):
        pool.check_integrity()
