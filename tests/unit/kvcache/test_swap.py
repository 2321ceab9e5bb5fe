"""Swapping and the host's tier of the prefix cache, move by move; the simulation tries them in any order."""

import itertools

from quire.kvcache.manager import KVManager
from quire.kvcache.prefix import BlockHasher, root_hash
from quire.kvcache.table import NO_MATCH, BlockTable
from quire.protocol.cache import CacheGroup, CacheLayout
from quire.protocol.stats import TierStats
from quire.protocol.step import DiskNews

ROOT = root_hash(None)

ids = itertools.count()


def make(num_blocks: int = 6, num_host: int = 6, caching: bool = True, speed: float = 0.0) -> KVManager:
    layout = CacheLayout(
        block_size=4,
        groups=[CacheGroup([0])],
        num_blocks=[num_blocks],
        max_model_len=100,
        num_host_blocks=[num_host],
        block_bytes=[100],
        copy_bytes_per_second=speed,
    )
    return KVManager(layout, caching)


def stats(kv: KVManager) -> TierStats:
    assert kv.space is not None
    return kv.space.stats()


def computed(kv: KVManager, tokens: list[int]) -> BlockTable:
    """A table whose tokens, but for a last one, are computed; in a plan of its own."""
    table = kv.open(next(ids), [*tokens, 99], [], ROOT)
    match = kv.match_prefix(table)
    kv.allocate(table, match, len(tokens) + 1 - match.num_tokens)
    kv.end_plan()
    kv.commit(table, len(tokens))
    kv.plan_done()
    return table


def out_of_the_way(kv: KVManager, table: BlockTable, num_computed: int) -> list[tuple[int, int, int]]:
    assert kv.swap_out(table, num_computed)
    kv.free(table)
    moved = kv.end_plan().out
    kv.plan_done()
    return moved


def back(kv: KVManager, table: BlockTable) -> list[tuple[int, int, int]]:
    match = kv.match_prefix(table)
    assert kv.shortage(table, match, 1) <= 0
    kv.allocate(table, match, table.num_tokens - match.num_tokens)
    moved = kv.end_plan().in_
    kv.plan_done()
    return moved


def test_a_sequence_goes_and_comes_back_with_its_half_filled_block() -> None:
    for caching in (True, False):
        kv = make(caching=caching)
        table = computed(kv, list(range(10)))
        blocks = table.block_ids[0].copy()
        assert [device for _, device, _ in out_of_the_way(kv, table, 10)] == blocks
        assert stats(kv).host_cache_usage_perc == 0.5
        kv.check_integrity()
        computed_meanwhile = computed(kv, list(range(50, 73)))  # takes all blocks
        kv.free(computed_meanwhile)
        match = kv.match_prefix(table)
        assert match.num_tokens == 10
        assert match.is_swapped
        assert len(back(kv, table)) == 3
        assert stats(kv).host_cache_usage_perc == 0
        kv.commit(table, 10)
        kv.check_integrity()


def test_what_the_device_still_has_is_not_brought_in() -> None:
    kv = make()
    table = computed(kv, list(range(10)))
    first = table.block_ids[0][:2]
    out_of_the_way(kv, table, 10)
    assert len(back(kv, table)) == 1, "the full blocks were free, and still there"
    assert table.block_ids[0][:2] == first


def test_what_two_share_goes_out_once() -> None:
    kv = make(num_host=5)
    table = computed(kv, list(range(10)))
    fork = kv.fork(table, next(ids), [], 10)
    assert kv.swap_out(table, 10)
    assert kv.swap_out(fork, 10)
    kv.free(table)
    kv.free(fork)
    assert len(kv.end_plan().out) == 2 + 2, "two named blocks, and each one's own half-filled one"
    kv.plan_done()
    kv.check_integrity()
    kv.drop_swapped(table)
    kv.drop_swapped(fork)
    kv.check_integrity()


def test_a_full_host_swaps_nothing_and_loses_nothing() -> None:
    kv = make(num_host=2)
    table = computed(kv, list(range(10)))
    assert not kv.swap_out(table, 10)
    assert table.swapped is None
    kv.free(table)
    assert kv.end_plan().out == []
    kv.plan_done()
    kv.check_integrity()
    assert kv.match_prefix(table).num_tokens == 8, "the prefix cache of the device still has it"


def test_an_evicted_prefix_falls_to_the_host_and_comes_back() -> None:
    kv = make()
    kv.free(computed(kv, list(range(9))))
    kv.free(computed(kv, list(range(50, 73))))
    again = kv.open(next(ids), list(range(9)), [], ROOT)
    match = kv.match_prefix(again)
    assert (match.num_tokens, match.num_from_host, match.is_swapped) == (8, 2, False)
    kv.allocate(again, match, 1)
    waiting = kv.open(next(ids), list(range(9)), [], ROOT)
    assert kv.match_prefix(waiting).awaits == again.hashes[1], "another need not bring it in, too"
    moves = kv.end_plan()
    assert len(moves.in_) == 2
    kv.plan_done()
    kv.commit(again, 9)
    assert kv.match_prefix(waiting).num_from_host == 0
    found = stats(kv)
    assert (found.host_hits_total, found.swapped_in_bytes_total) == (2, 200)
    kv.check_integrity()


def test_prefixes_never_push_out_what_was_swapped() -> None:
    kv = make(num_host=3)
    table = computed(kv, list(range(10)))
    out_of_the_way(kv, table, 10)
    for start in (100, 200, 300):
        kv.free(computed(kv, list(range(start, start + 23))))
    assert kv.match_prefix(table).num_tokens == 10
    kv.check_integrity()


def test_plans_that_are_never_carried_out_leave_nothing_on_the_host() -> None:
    kv = make()
    kv.free(computed(kv, list(range(9))))
    late = kv.open(next(ids), list(range(50, 74)), [], ROOT)
    kv.allocate(late, NO_MATCH, 24)
    assert kv.end_plan().out, "evicted"
    kv.free(late)
    kv.cancel()
    kv.check_integrity()
    assert kv.match_prefix(kv.open(next(ids), list(range(9)), [], ROOT)).num_tokens == 0


def test_a_source_is_not_overwritten_in_the_plan_that_reads_it() -> None:
    kv = make(num_blocks=4, num_host=1)
    table = computed(kv, list(range(3)))
    out_of_the_way(kv, table, 3)
    kv.free(computed(kv, list(range(50, 65))))  # three full blocks of a prefix that the host has no room for
    match = kv.match_prefix(table)
    kv.allocate(table, match, 1)
    hungry = kv.open(next(ids), list(range(80, 91)), [], ROOT)
    kv.allocate(hungry, kv.match_prefix(hungry), 11)  # evicts, while the host's only block is still to be read
    moves = kv.end_plan()
    assert moves.in_
    assert not moves.out
    kv.plan_done()


def test_the_price_is_that_of_both_ways() -> None:
    kv = make(speed=1000.0)
    table = computed(kv, list(range(10)))
    spaces = [one.space for one in (kv, make(), make(speed=1000.0))]
    found: list[bool] = []
    for space, seconds in zip(spaces, (0.055, 0.055, 0.065), strict=True):  # of the second no copy's price is known
        assert space is not None
        assert space.pays(table, 10), "a token's price is not known"
        space.learn(num_tokens=40, num_sequences=1, seconds=40 * seconds)
        found.append(space.pays(table, 10))
    assert found == [False, True, True]  # ten tokens, or three blocks there and back: 0.6 s


def test_a_reset_forgets_the_hosts_prefixes_too() -> None:
    kv = make()
    kv.free(computed(kv, list(range(9))))
    kv.free(computed(kv, list(range(50, 73))))
    assert kv.reset_prefix_cache()
    assert kv.match_prefix(kv.open(next(ids), list(range(9)), [], ROOT)).num_tokens == 0
    kv.check_integrity()


def test_a_block_that_is_to_be_read_to_is_not_written_in_the_same_plan() -> None:
    layout = CacheLayout(
        block_size=4, groups=[CacheGroup([0])], num_blocks=[2], max_model_len=8, num_host_blocks=[1], block_bytes=[1]
    )
    name = BlockHasher(4)(root_hash(None), [1, 2, 3, 4])
    kv = KVManager(layout, stored=[[name]])
    table = computed(kv, [0, 1, 2])
    assert kv.swap_out(table, 3)
    kv.free(table)
    kv.drop_swapped(table)
    other = kv.open(next(ids), [1, 2, 3, 4, 5], [], ROOT)
    assert kv.fetch(other, kv.match_prefix(other)) == name
    moves = kv.end_plan()
    assert (moves.out, moves.fetch) == ([], [(0, 0, name)])
    kv.check_integrity()


def test_what_is_being_read_at_a_reset_is_not_found() -> None:
    """Its name may stand for other numbers by the time that it comes: those of other weights."""
    layout = CacheLayout(
        block_size=4, groups=[CacheGroup([0])], num_blocks=[6], max_model_len=100, num_host_blocks=[6], block_bytes=[9]
    )
    prompt = [1, 2, 3, 4, 5]
    (name,) = BlockHasher(4).names(root_hash(None), prompt)
    kv = KVManager(layout, stored=[[name]])
    table = kv.open(next(ids), prompt, [], ROOT)
    assert kv.fetch(table, kv.match_prefix(table)) == name
    kv.watch(name)
    (fetch,) = kv.end_plan().fetch
    assert kv.reset_prefix_cache(), "nothing runs"
    assert kv.disk is not None
    kv.disk.close()
    kv.plan_done(DiskNews(fetched=[(0, fetch[1], True)]))
    assert kv.settled == [name], "who waits for it goes on"
    assert kv.match_prefix(table).num_tokens == 0
    kv.check_integrity()
