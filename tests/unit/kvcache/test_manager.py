"""The KV manager's rules, one by one; `tests/property/test_kv_manager_machine.py` tries them in any order."""

import itertools

import pytest

from quire.config.cache import CacheConfig
from quire.errors import ConfigError
from quire.kvcache.manager import NO_MATCH, BlockTable, KVManager
from quire.protocol.step import BlockCopy

SIZE = 4
ids = itertools.count()


def make(num_blocks: int = 10, caching: bool = True) -> KVManager:
    return KVManager(CacheConfig(num_blocks, SIZE, caching))


def admit(kv: KVManager, tokens: list[int], salt: str | None = None) -> tuple[BlockTable, int]:
    """A table with blocks for its tokens, and how many of them were found."""
    table = kv.open(next(ids), tokens, [], salt)
    match = kv.match_prefix(table)
    assert kv.shortage(table, match) <= 0
    kv.allocate(table, match)
    return table, len(match.block_ids) * SIZE


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
    later = kv.open(99, [*range(8), 50, 51], [], None)
    assert kv.match_prefix(later) == ([], True)
    kv.commit(first, 4)
    assert kv.match_prefix(later) == (first.block_ids[:1], True)
    kv.commit(first, 8)
    assert kv.match_prefix(later) == (first.block_ids[:2], False)
    other_salt = kv.open(100, list(range(10)), [], "salt")
    assert kv.match_prefix(other_salt) == ([], False)
    kv.free(first)
    second, _ = admit(kv, [9] * 8)
    waiting = kv.open(101, [9] * 9, [], None)
    assert kv.match_prefix(waiting).next_is_computing
    twin = kv.open(102, [9] * 8, [], None)
    kv.allocate(twin, NO_MATCH)
    kv.free(twin)  # it computed the same, but it was not waited for
    assert kv.match_prefix(waiting).next_is_computing
    kv.free(second)  # it will never be computed now
    assert not kv.match_prefix(waiting).next_is_computing


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
    head, middle, tail = first.block_ids
    kv.free(first)
    second, _ = admit(kv, [90] * 8)
    assert tail in second.block_ids
    assert kv.match_prefix(kv.open(99, list(range(12)), [], None)).block_ids == [head, middle]


def test_a_block_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = make()
    calls: list[list[int]] = []
    whole = kv._hash
    monkeypatch.setattr(kv, "_hash", lambda parent, tokens: calls.append(tokens) or whole(parent, tokens))
    table = kv.open(1, list(range(9)), [], None)
    for _ in range(3):
        kv.match_prefix(table)
    kv.allocate(table, kv.match_prefix(table))
    kv.commit(table, 9)
    kv.free(table)
    kv.allocate(table, kv.match_prefix(table))
    assert calls == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_shortage_counts_hits_that_are_free() -> None:
    kv = make(num_blocks=4)
    kv.free(computed(kv, list(range(9))))
    admit(kv, [90] * 2)
    table = kv.open(99, list(range(13)), [], None)
    match = kv.match_prefix(table)
    assert len(match.block_ids) == 2
    assert kv.shortage(table, match) == 1


def test_a_fork_shares_all_blocks_and_copies_the_last_one_on_write() -> None:
    kv = make()
    root = computed(kv, [1, 2, 3, 4, 5, 6])
    forks = [kv.fork(root, next(ids), [], 6) for _ in range(2)]
    assert kv.num_free_blocks == 8
    shared = root.block_ids[1]
    copies: list[BlockCopy] = []
    for table in [root, *forks]:
        assert kv.append(table, 6, 7) == []
        copies += kv.end_plan()
    assert [(c.sequence_id, c.block_index, c.source) for c in copies] == [
        (root.sequence_id, 1, shared),
        (forks[0].sequence_id, 1, shared),
    ]
    assert [c.destination for c in copies] == [root.block_ids[1], forks[0].block_ids[1]]
    assert forks[1].block_ids[1] == shared, "the last owner writes in place"
    assert kv.num_free_blocks == 6
    kv.check_integrity()


def test_a_fork_at_a_block_border_copies_nothing() -> None:
    kv = make()
    root = computed(kv, [1, 2, 3, 4])
    fork = kv.fork(root, next(ids), [], 4)
    assert len(kv.append(fork, 4, 5) or []) == 1
    assert kv.end_plan() == []


def test_append_changes_nothing_when_blocks_run_out() -> None:
    kv = make(num_blocks=2)
    root = computed(kv, [1, 2, 3, 4, 5])
    fork = kv.fork(root, next(ids), [], 5)
    before = list(fork.block_ids)
    assert kv.append(fork, 5, 6) is None
    assert fork.block_ids == before
    assert kv.end_plan() == []
    kv.free(root)
    assert kv.append(fork, 5, 6) == []  # nobody shares it any more
    assert kv.end_plan() == []


def test_the_source_of_a_planned_copy_is_not_handed_out_in_the_same_plan() -> None:
    kv = make(num_blocks=3)
    root = computed(kv, [1, 2, 3, 4, 5])
    fork = kv.fork(root, next(ids), [], 5)
    source = root.block_ids[1]
    assert kv.append(root, 5, 6) == []
    kv.free(fork)  # preempted: it was the last owner
    assert kv.num_free_blocks == 0
    assert [copy.source for copy in kv.end_plan()] == [source]
    assert kv.num_free_blocks == 1
    kv.check_integrity()


def test_a_copy_is_dropped_with_its_sequence() -> None:
    kv = make(num_blocks=3)
    root = computed(kv, [1, 2, 3, 4, 5])
    fork = kv.fork(root, next(ids), [], 5)
    assert kv.append(root, 5, 6) == []
    kv.free(fork)
    kv.free(root)
    assert kv.num_free_blocks == 3
    assert kv.end_plan() == []
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
    kept, one.block_ids[0] = one.block_ids[0], two.block_ids[0]
    with pytest.raises(AssertionError):
        kv.check_integrity()
    one.block_ids[0] = kept
    kv.check_integrity()
    one.prompt_token_ids[0] = 7
    with pytest.raises(AssertionError, match="wrong hash"):
        kv.check_integrity()


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0), (True, 16), (4, 1.5)])
def test_config_is_checked(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ConfigError, match=r"num_blocks|block_size"):
        CacheConfig(num_blocks, block_size)
