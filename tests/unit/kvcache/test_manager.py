"""The KV manager's rules, one by one; `tests/property/test_kv_manager_machine.py` tries them in any order."""

import itertools

import pytest

from quire.kvcache.manager import KVManager
from quire.kvcache.prefix import root_hash
from quire.kvcache.table import NO_MATCH, NOTHING_APPENDED, BlockTable
from quire.protocol.cache import CacheGroup, CacheLayout

ROOT = root_hash(None)

SIZE = 4
ids = itertools.count()


def layout(num_blocks: int, block_size: int = SIZE) -> CacheLayout:
    return CacheLayout(block_size=block_size, groups=[CacheGroup([0])], num_blocks=[num_blocks], max_model_len=100)


def make(num_blocks: int = 10, caching: bool = True) -> KVManager:
    return KVManager(layout(num_blocks), caching)


def appended(kv: KVManager, table: BlockTable, start: int, stop: int) -> list[int] | None:
    """The blocks that were added to a table of one group."""
    added = kv.append(table, start, stop)
    return added and (added.new_block_ids[0] if added.new_block_ids else [])


def admit(kv: KVManager, tokens: list[int], salt: str | None = None) -> tuple[BlockTable, int]:
    """A table with blocks for its tokens, and how many of them were found."""
    table = kv.open(next(ids), tokens, [], root_hash(salt))
    match = kv.match_prefix(table)
    assert kv.shortage(table, match, len(tokens) - match.num_tokens) <= 0
    kv.allocate(table, match, len(tokens) - match.num_tokens)
    return table, match.num_tokens


def computed(kv: KVManager, tokens: list[int], salt: str | None = None) -> BlockTable:
    table, _ = admit(kv, tokens, salt)
    kv.commit(table, len(tokens))
    return table


def test_blocks_are_found_only_once_they_are_computed() -> None:
    kv = make()
    first, hit = admit(kv, list(range(10)))
    assert hit == 0
    kv.commit(first, 5)  # a chunk: one full block
    _, hit = admit(kv, list(range(10)))
    assert hit == SIZE
    kv.commit(first, 10)
    _, hit = admit(kv, list(range(10)))
    assert hit == 2 * SIZE


def test_the_next_missing_block_may_be_on_its_way() -> None:
    kv = make()
    first, _ = admit(kv, list(range(10)))
    later = kv.open(99, [*range(8), 50, 51], [], ROOT)
    assert kv.match_prefix(later)[:3] == (0, [[]], first.hashes[1]), "the last block that they share"
    kv.commit(first, 4)
    assert kv.match_prefix(later)[:3] == (4, [first.block_ids[0][:1]], first.hashes[1])
    kv.commit(first, 8)
    assert kv.match_prefix(later)[:3] == (8, [first.block_ids[0][:2]], None)
    other_salt = kv.open(100, list(range(10)), [], root_hash("salt"))
    assert kv.match_prefix(other_salt)[:3] == (0, [[]], None)
    kv.free(first)
    second, _ = admit(kv, [9] * 8)
    waiting = kv.open(101, [9] * 9, [], ROOT)
    assert kv.match_prefix(waiting).awaits is not None
    twin = kv.open(102, [9] * 8, [], ROOT)
    kv.allocate(twin, NO_MATCH, 8)
    kv.free(twin)  # it computed the same, but it was not waited for
    assert kv.match_prefix(waiting).awaits is not None
    kv.free(second)  # it will never be computed now
    assert kv.match_prefix(waiting).awaits is None


def test_a_watched_block_is_told_once_it_is_computed_or_given_up() -> None:
    kv = make()
    first, _ = admit(kv, list(range(14)))
    shared, longer = kv.open(99, [*range(8), 50, 51], [], ROOT), kv.open(100, [*range(12), 60], [], ROOT)
    names = [kv.match_prefix(table).awaits for table in (shared, longer)]
    assert names == [first.hashes[1], first.hashes[2]]
    for name in names:
        kv.watch(name or b"")
    kv.commit(first, 4)
    assert kv.settled == [], "one block of the two is there"
    kv.commit(first, 9)
    assert kv.settled == names[:1]
    kv.free(first)
    assert kv.settled == names


@pytest.mark.parametrize("num_tokens", [1, SIZE, SIZE + 1, 2 * SIZE])
def test_a_hit_never_covers_the_last_token(num_tokens: int) -> None:
    kv = make()
    kv.free(computed(kv, list(range(2 * SIZE))))
    _, hit = admit(kv, list(range(num_tokens)))
    assert hit == (num_tokens - 1) // SIZE * SIZE


def test_salts_share_nothing() -> None:
    kv = make()
    kv.free(computed(kv, list(range(9)), "mine"))
    assert admit(kv, list(range(9)))[1] == 0
    assert admit(kv, list(range(9)), "yours")[1] == 0
    assert admit(kv, list(range(9)), "mine")[1] == 8


def test_adapters_share_nothing() -> None:
    kv = make()
    kv.free(computed(kv, list(range(9))))
    for digest, found in ((b"", 8), (b"one", 0), (b"two", 0)):
        assert kv.match_prefix(kv.open(next(ids), list(range(9)), [], root_hash(None, digest))).num_tokens == found


def test_without_caching_nothing_is_found() -> None:
    kv = make(caching=False)
    kv.free(computed(kv, list(range(9))))
    table, hit = admit(kv, list(range(9)))
    assert hit == 0
    assert table.hashes == []
    kv.check_integrity()


def test_output_tokens_are_cached_like_the_prompt() -> None:
    kv = make()
    table = computed(kv, [1, 2, 3])
    for position in range(3, 9):
        table.output_token_ids.append(position)
        assert kv.append(table, position, position + 1) is not None
        kv.commit(table, position + 1)
    kv.free(table)
    assert admit(kv, [1, 2, 3, 3, 4, 5, 6, 7, 8, 9])[1] == 8


def test_the_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    kv = make(num_blocks=4)
    first = computed(kv, list(range(12)))
    head, middle, tail = first.block_ids[0]
    kv.free(first)
    second, _ = admit(kv, [90] * 8)
    assert tail in second.block_ids[0]
    assert kv.match_prefix(kv.open(99, list(range(12)), [], ROOT)).block_ids == [[head, middle]]


def test_a_block_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = make()
    calls: list[list[int]] = []
    whole = kv._hash
    monkeypatch.setattr(kv, "_hash", lambda parent, tokens: calls.append(tokens) or whole(parent, tokens))
    table = kv.open(1, list(range(9)), [], ROOT)
    for _ in range(3):
        kv.match_prefix(table)
    kv.allocate(table, kv.match_prefix(table), 9)
    kv.commit(table, 9)
    kv.free(table)
    kv.allocate(table, kv.match_prefix(table), 1)
    assert calls == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_shortage_counts_hits_that_are_free() -> None:
    kv = make(num_blocks=4)
    kv.free(computed(kv, list(range(9))))
    admit(kv, [90] * 2)
    table = kv.open(99, list(range(13)), [], ROOT)
    match = kv.match_prefix(table)
    assert match.num_tokens == 2 * SIZE
    assert kv.shortage(table, match, 1) == 1


def test_a_fork_shares_all_blocks_and_copies_the_last_one_on_write() -> None:
    kv = make()
    root = computed(kv, [1, 2, 3, 4, 5, 6])
    forks = [kv.fork(root, next(ids), [], 6) for _ in range(2)]
    assert kv.num_free_blocks == [8]
    shared = root.block_ids[0][1]
    for table in [root, *forks]:
        added = kv.append(table, 6, 7)
        assert added is not None
        assert added.new_block_ids == []
        assert added.edits == ([(0, 1, table.block_ids[0][1])] if table is not forks[1] else [])
    assert kv.end_plan().copies == [
        (0, shared, root.block_ids[0][1]),
        (0, shared, forks[0].block_ids[0][1]),
    ]
    assert forks[1].block_ids[0][1] == shared, "the last owner writes in place"
    assert kv.num_free_blocks == [6]
    kv.check_integrity()


def test_a_fork_at_a_block_border_copies_nothing() -> None:
    kv = make()
    root = computed(kv, [1, 2, 3, 4])
    fork = kv.fork(root, next(ids), [], 4)
    assert len(appended(kv, fork, 4, 5) or []) == 1
    assert kv.end_plan().copies == []


def test_append_changes_nothing_when_blocks_run_out() -> None:
    kv = make(num_blocks=2)
    root = computed(kv, [1, 2, 3, 4, 5])
    fork = kv.fork(root, next(ids), [], 5)
    before = list(fork.block_ids[0])
    assert kv.append(fork, 5, 6) is None
    assert fork.block_ids == [before]
    assert kv.end_plan().copies == []
    kv.free(root)
    assert kv.append(fork, 5, 6) == NOTHING_APPENDED  # nobody shares it any more
    assert kv.end_plan().copies == []


def test_the_source_of_a_planned_copy_is_not_handed_out_in_the_same_plan() -> None:
    kv = make(num_blocks=3)
    root = computed(kv, [1, 2, 3, 4, 5])
    fork = kv.fork(root, next(ids), [], 5)
    source = root.block_ids[0][1]
    assert appended(kv, root, 5, 6) == []
    kv.free(fork)  # preempted: it was the last owner
    assert kv.num_free_blocks == [0]
    assert [source for _, source, _ in kv.end_plan().copies] == [source]
    assert kv.num_free_blocks == [1]
    kv.check_integrity()


def test_a_copy_is_dropped_with_its_sequence() -> None:
    kv = make(num_blocks=3)
    root = computed(kv, [1, 2, 3, 4, 5])
    fork = kv.fork(root, next(ids), [], 5)
    assert appended(kv, root, 5, 6) == []
    kv.free(fork)
    kv.free(root)
    assert kv.num_free_blocks == [3]
    assert kv.end_plan().copies == []
    kv.check_integrity()


def test_everyone_who_shared_a_block_may_go_before_the_plan_is_complete() -> None:
    kv = make(num_blocks=6)
    root = computed(kv, [1, 2, 3, 4, 5])
    forks = [kv.fork(root, next(ids), [], 5) for _ in range(2)]
    for table in (root, forks[0]):
        assert appended(kv, table, 5, 6) == []
    for table in (forks[1], root, forks[0]):
        kv.free(table)
    assert kv.end_plan().copies == []
    assert kv.num_free_blocks == [6]
    kv.check_integrity()


def test_reset_prefix_cache_waits_until_nothing_runs() -> None:
    kv = make()
    table = computed(kv, list(range(9)))
    assert not kv.reset_prefix_cache()
    kv.free(table)
    assert kv.reset_prefix_cache()
    assert admit(kv, list(range(9)))[1] == 0


def test_check_integrity_sees_a_block_given_to_two_and_a_wrong_hash() -> None:
    kv = make()
    one, two = computed(kv, [1] * 6), computed(kv, [2] * 6)
    kept, one.block_ids[0][0] = one.block_ids[0][0], two.block_ids[0][0]
    with pytest.raises(AssertionError):
        kv.check_integrity()
    one.block_ids[0][0] = kept
    kv.check_integrity()
    one.prompt_token_ids[0] = 7
    with pytest.raises(AssertionError, match="wrong hash"):
        kv.check_integrity()
