"""KV groups with a window: what they take and free as a sequence goes on, and which prefixes they still hold."""

import itertools

import pytest

from quire.kvcache.groups import KVGroup, window_reach
from quire.kvcache.manager import KVManager
from quire.kvcache.prefix import root_hash
from quire.kvcache.table import NO_MATCH, BlockTable
from quire.protocol.cache import CacheGroup, CacheLayout

ROOT = root_hash(None)

SIZE = 16
FULL, WINDOW = 0, 1
ids = itertools.count()


def make(*num_blocks: int, windows: tuple[int | None, ...] = (None, 100), caching: bool = True) -> KVManager:
    groups = [CacheGroup([number], window) for number, window in enumerate(windows)]
    blocks = list(num_blocks) or [200] * len(groups)
    return KVManager(CacheLayout(block_size=SIZE, groups=groups, num_blocks=blocks, max_model_len=4096), caching)


def admit(kv: KVManager, tokens: list[int], chunk: int) -> BlockTable:
    table = kv.open(next(ids), tokens, [], ROOT)
    match = kv.match_prefix(table)
    assert kv.shortage(table, match, chunk) <= 0
    kv.allocate(table, match, chunk)
    return table


def compute(kv: KVManager, table: BlockTable, start: int, stop: int, chunk: int) -> None:
    for position in range(start, stop, chunk):
        end = min(position + chunk, stop)
        assert kv.append(table, position, end) is not None
        kv.end_plan()
        kv.commit(table, end)


@pytest.mark.parametrize(
    ("num_computed", "window", "block_size", "first"),
    [(0, 8, 16, 0), (70, 8, 16, 0), (71, 8, 16, 4), (134, 8, 16, 4), (135, 8, 16, 8), (163, 100, 16, 4)]
    + [(162, 100, 16, 0), (5000, None, 16, 0), (71, 8, 24, 2), (71, 8, 128, 0), (135, 8, 128, 1), (200, 1, 16, 12)],
)
def test_blocks_are_needed_from_the_tile_of_keys_that_the_window_begins_in(
    num_computed: int, window: int | None, block_size: int, first: int
) -> None:
    assert KVGroup(1, block_size, window, None).first_visible(num_computed) == first


@pytest.mark.parametrize(("window", "size"), [(1, 16), (8, 16), (100, 16), (64, 1), (65, 24), (4096, 128)])
def test_the_reach_of_a_window_is_the_most_that_is_held_before_the_next_token(window: int, size: int) -> None:
    group = KVGroup(1, size, window, None)
    held = [n - group.first_visible(n) * size for n in range(2 * window + 6 * 64 * size)]
    assert max(held) <= window_reach(window, size)
    if 64 % size == 0:
        assert max(held) == window_reach(window, size)


def test_a_chunked_prompt_takes_blocks_as_it_goes_and_frees_those_behind() -> None:
    kv = make()
    table = admit(kv, list(range(1000)), 64)
    assert [len(blocks) for blocks in table.block_ids] == [63, 4], "full attention has all of the prompt's blocks"
    held: list[int] = []
    for start in range(0, 960, 64):
        added = kv.append(table, start, start + 64)
        assert added is not None
        assert [len(blocks) for blocks in added.new_block_ids or [[], []]] == [0, 4 if start else 0]
        held.append(kv.num_blocks[WINDOW] - kv.num_free_blocks[WINDOW])
        kv.commit(table, start + 64)
    # 64 more tokens a step; from 163 computed tokens on, the first tile of 64 has fallen out, and then one a step.
    assert held == [4, 8, 12, *([12] * 12)]
    assert kv.num_free_blocks[FULL] == 200 - 63
    assert table.first_block == [0, (960 - 99) // 64 * 4]
    assert set(table.block_ids[WINDOW][: table.first_block[WINDOW]]) == {0}
    kv.check_integrity()
    kv.free(table)
    assert kv.num_free_blocks == kv.num_blocks


def test_decoding_frees_exactly_when_a_tile_is_left_behind() -> None:
    kv = make(caching=False)
    table = admit(kv, [1] * 100, 100)
    kv.commit(table, 100)
    firsts: list[tuple[int, int]] = []
    for position in range(100, 400):
        table.output_token_ids.append(1)
        compute(kv, table, position, position + 1, 1)
        if not firsts or table.first_block[WINDOW] != firsts[-1][1]:
            firsts.append((position + 1, table.first_block[WINDOW]))
    assert firsts == [(101, 0), (163, 4), (227, 8), (291, 12), (355, 16)]


def test_what_fell_out_is_found_until_its_block_is_used_again() -> None:
    kv = make(100, 60)
    tokens = list(range(800))
    table = admit(kv, tokens, 80)
    compute(kv, table, 0, 800, 80)
    other = kv.open(next(ids), tokens[:400], [], ROOT)
    match = kv.match_prefix(other)
    assert match.num_tokens == 384
    first = (384 - 99) // 64 * 4
    assert match.block_ids[WINDOW][:first] == [0] * first
    kv.allocate(other, match, 16)
    assert other.first_block == [0, first]
    kv.check_integrity()
    kv.free(other)
    admit(kv, [7] * 320, 320)  # takes what never was named, and what was freed first: the beginning of the sequence
    assert kv.match_prefix(kv.open(next(ids), tokens[:160], [], ROOT)).num_tokens == 0
    assert kv.match_prefix(kv.open(next(ids), tokens[:400], [], ROOT)).num_tokens == 384
    assert kv.match_prefix(kv.open(next(ids), [*tokens, 1], [], ROOT)).num_tokens == 800


def test_a_prefix_ends_where_every_window_is_whole() -> None:
    kv = make(windows=(None, 8, 100))
    tokens = list(range(480))
    table = admit(kv, tokens, 480)
    kv.commit(table, 480)
    blocks = [kv.match_prefix(kv.open(next(ids), [*tokens, 1], [], ROOT)).block_ids[group] for group in range(3)]
    longer = [len(found) for found in blocks]
    assert longer == [30, 30, 30]
    kv.free(table)
    # Forget one block of the wide window, number 24: what needs it is not found any more, what ends before it is.
    pool = kv._groups[2].pool
    pool.forget(blocks[2][24])
    assert kv.match_prefix(kv.open(next(ids), [*tokens, 1], [], ROOT)).num_tokens == 24 * SIZE
    # And one of the narrow window before it: 7 positions before 384 lie in the tile of blocks 20 to 23.
    kv._groups[1].pool.forget(kv._groups[1].pool.find(table.hashes[22]) or 0)
    assert kv.match_prefix(kv.open(next(ids), [*tokens, 1], [], ROOT)).num_tokens == 22 * SIZE


def test_windows_alone_hold_a_prefix_by_its_end() -> None:
    kv = make(40, windows=(100,))
    tokens = list(range(900))
    table = admit(kv, tokens, 90)
    compute(kv, table, 0, 900, 90)
    kv.free(table)
    assert kv.match_prefix(kv.open(next(ids), tokens, [], ROOT)).num_tokens == 896
    assert kv.match_prefix(kv.open(next(ids), tokens[:100], [], ROOT)).num_tokens == 0, "its beginning was overwritten"


def test_a_fork_is_copied_on_write_in_every_group() -> None:
    kv = make()
    table = admit(kv, list(range(200)), 200)
    kv.commit(table, 200)
    fork = kv.fork(table, next(ids), [], 200)
    source = [blocks[12] for blocks in table.block_ids]
    added = kv.append(fork, 200, 201)
    assert added is not None
    assert added.edits == [(FULL, 12, fork.block_ids[FULL][12]), (WINDOW, 12, fork.block_ids[WINDOW][12])]
    assert kv.end_plan().copies == [(group, source[group], fork.block_ids[group][12]) for group in (FULL, WINDOW)]
    kv.check_integrity()
    kv.free(table)
    fork.output_token_ids += [5] * 100
    compute(kv, fork, 201, 300, 33)
    assert fork.first_block[WINDOW] == 12
    kv.check_integrity()


def test_nothing_changes_when_one_group_is_short() -> None:
    kv = make(20, 5)
    table = admit(kv, list(range(160)), 64)
    assert kv.num_free_blocks == [10, 1]
    before = [blocks.copy() for blocks in table.block_ids]
    assert kv.append(table, 64, 128) is None
    assert table.block_ids == before
    assert kv.append(table, 64, 80) is not None
    waiting = kv.open(next(ids), [9] * 32, [], ROOT)
    assert kv.shortage(waiting, NO_MATCH, 32) == 2
    assert kv.shortage(waiting, NO_MATCH, 16) == 1


def test_what_can_never_fit_is_known() -> None:
    assert make(20, 20).max_tokens_ever() == 320
    assert make(20, 5).max_tokens_ever() == 80, "the window alone shows up to 163 tokens"
    assert make(20, windows=(100,)).max_tokens_ever() >= 10**6
