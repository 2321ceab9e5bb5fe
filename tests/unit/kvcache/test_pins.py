"""Pinned prefixes: never evicted, never in the way of a request, gone with a reset."""

import pytest

from quire.errors import InvalidRequestError
from quire.kvcache.manager import KVManager
from quire.kvcache.prefix import root_hash
from quire.kvcache.table import BlockTable
from quire.protocol.cache import CacheGroup, CacheLayout, PinnedPrefix

ROOT = root_hash(None)

SIZE = 64
PROMPT = list(range(3 * SIZE + 5))


def make(num_blocks: int = 12, max_model_len: int = 6 * SIZE, windows: tuple[int | None, ...] = (None,)) -> KVManager:
    groups = [CacheGroup([number], window) for number, window in enumerate(windows)]
    layout = CacheLayout(
        block_size=SIZE, groups=groups, num_blocks=[num_blocks] * len(groups), max_model_len=max_model_len
    )
    return KVManager(layout)


def compute(kv: KVManager, tokens: list[int], salt: str | None = None) -> BlockTable:
    table = kv.open(len(tokens), tokens, [], root_hash(salt))
    match = kv.match_prefix(table)
    assert kv.shortage(table, match, len(tokens) - match.num_tokens) <= 0
    kv.allocate(table, match, len(tokens) - match.num_tokens)
    kv.commit(table, len(tokens))
    kv.free(table)
    kv.end_plan()
    return table


def num_cached(kv: KVManager, tokens: list[int], salt: str | None = None) -> int:
    return kv.match_prefix(kv.open(-2, tokens, [], root_hash(salt))).num_tokens


@pytest.mark.parametrize("windows", [(None,), (None, 70), (70,)])
def test_a_pinned_prefix_outlives_whatever_comes(windows: tuple[int | None, ...]) -> None:
    kv = make(windows=windows)
    compute(kv, PROMPT)
    pinned = kv.pins.add("system", PROMPT)
    assert pinned.num_tokens == 3 * SIZE
    assert kv.pins.listed() == [pinned]
    for number in range(5):
        compute(kv, [1_000 * number] * 5 * SIZE)
        kv.check_integrity()
    assert num_cached(kv, [*PROMPT, 1]) == 3 * SIZE
    assert num_cached(kv, PROMPT[: 3 * SIZE]) == 2 * SIZE, "the last token has to be computed"
    assert kv.pins.remove("system")
    assert not kv.pins.remove("system")
    assert num_cached(kv, [*PROMPT, 1]) == 3 * SIZE, "until it is evicted"
    for number in range(5):
        compute(kv, [1_000 * number + 1] * 5 * SIZE)
    assert num_cached(kv, [*PROMPT, 1]) == 0
    kv.check_integrity()
    assert kv.num_free_blocks == kv.num_blocks


def test_pins_share_blocks_and_give_them_back_one_by_one() -> None:
    kv = make(20)
    compute(kv, PROMPT)
    other = [*PROMPT[: 2 * SIZE], *[7] * SIZE]
    compute(kv, other)
    kv.pins.add("a", PROMPT)
    assert kv.pins.add("b", other) == PinnedPrefix("b", 3 * SIZE, 3)
    assert kv.pins.num_blocks == [4]
    kv.pins.remove("a")
    kv.check_integrity()
    assert kv.pins.num_blocks == [3]
    assert [prefix.name for prefix in kv.pins.listed()] == ["b"]


def test_what_cannot_be_pinned() -> None:
    kv = make()
    with pytest.raises(InvalidRequestError, match="the prompt has 5 tokens, less than a KV block"):
        kv.pins.add("a", [1] * 5)
    with pytest.raises(InvalidRequestError, match="not in the KV cache any more"):
        kv.pins.add("a", PROMPT)
    compute(kv, PROMPT)
    with pytest.raises(InvalidRequestError, match="not in the KV cache any more"):
        kv.pins.add("a", PROMPT, "another salt")
    kv.pins.add("a", PROMPT)
    with pytest.raises(InvalidRequestError, match="'a' is pinned already"):
        kv.pins.add("a", PROMPT)
    longer = [3] * 4 * SIZE
    compute(kv, longer)
    with pytest.raises(InvalidRequestError, match="7 of 12 KV blocks would be pinned, and at most 6 may be"):
        kv.pins.add("b", longer)
    kv.check_integrity()
    assert kv.pins.num_blocks == [3]


def test_the_longest_request_always_has_room() -> None:
    kv = make(num_blocks=8, max_model_len=6 * SIZE)
    compute(kv, PROMPT)
    with pytest.raises(InvalidRequestError, match="a request of 384 tokens could not run any more"):
        kv.pins.add("a", PROMPT)
    kv.pins.add("b", PROMPT[: 2 * SIZE])
    assert kv.max_tokens_ever() == 6 * SIZE


def test_a_reset_ends_all_pins() -> None:
    kv = make()
    compute(kv, PROMPT)
    kv.pins.add("a", PROMPT)
    running = kv.open(1, [5] * 10, [], ROOT)
    kv.allocate(running, kv.match_prefix(running), 10)
    assert not kv.reset_prefix_cache(), "somebody runs"
    assert kv.pins.listed()
    kv.free(running)
    assert kv.reset_prefix_cache()
    assert kv.pins.listed() == []
    assert kv.num_free_blocks == kv.num_blocks
    kv.check_integrity()
