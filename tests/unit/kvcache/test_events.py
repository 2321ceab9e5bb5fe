"""The diary of cached blocks: whoever follows it knows what the pools hold."""

import itertools

import msgspec

from quire.kvcache.manager import KVManager
from quire.kvcache.prefix import root_hash
from quire.kvcache.table import BlockTable
from quire.protocol.cache import CacheGroup, CacheLayout
from quire.protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch

ROOT = root_hash(None)

SIZE = 4
ids = itertools.count()


def make(num_blocks: int = 6, windows: tuple[int | None, ...] = (None,)) -> KVManager:
    groups = [CacheGroup([number], window) for number, window in enumerate(windows)]
    layout = CacheLayout(block_size=SIZE, groups=groups, num_blocks=[num_blocks] * len(groups), max_model_len=100)
    return KVManager(layout, keeps_events=True)


def take(kv: KVManager) -> list[KVEvent]:
    assert kv.events is not None
    return kv.events.take()


def compute(kv: KVManager, tokens: list[int], *stops: int) -> BlockTable:
    table = kv.open(next(ids), tokens, [], ROOT)
    kv.allocate(table, kv.match_prefix(table), len(tokens))
    for stop in (*stops, len(tokens)):
        kv.commit(table, stop)
    kv.free(table)
    return table


def test_blocks_are_stored_once_and_named_with_their_tokens() -> None:
    kv = make()
    first = compute(kv, [*range(10)], 5)
    one, two = take(kv)
    assert one == BlockStored(first.hashes[:1], None, [0, 1, 2, 3], SIZE, None, "GPU", None)
    assert two == BlockStored(first.hashes[1:2], first.hashes[0], [4, 5, 6, 7], SIZE, None, "GPU", None)
    second = compute(kv, [*range(8), 50, 51, 52, 53, 54])
    (event,) = take(kv)
    assert event == BlockStored(second.hashes[2:3], second.hashes[1], [50, 51, 52, 53], SIZE, None, "GPU", None)
    assert take(kv) == []


def test_followers_know_what_the_pool_holds() -> None:
    kv = make()
    known: set[bytes] = set()
    for number in range(20):
        compute(kv, [number % 7] * (5 + number % 11))
        for event in take(kv):
            if isinstance(event, BlockStored):
                assert known.isdisjoint(event.block_hashes)
                known.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                assert known.issuperset(event.block_hashes)
                known.difference_update(event.block_hashes)
        assert known == kv._groups[0].pool._block_of.keys()
    assert kv.pools[0].num_evicted > 0
    kv.reset_prefix_cache()
    assert take(kv) == [AllBlocksCleared()]


def test_of_two_that_compute_the_same_the_first_is_told() -> None:
    kv = make()
    tables = [kv.open(next(ids), [*range(5)], [], ROOT) for _ in range(2)]
    for table in tables:
        kv.allocate(table, kv.match_prefix(table), 5)
    for table in tables:
        kv.commit(table, 5)
    assert len(take(kv)) == 1
    for table in tables:
        kv.free(table)


def test_several_groups_are_numbered() -> None:
    kv = make(windows=(None, 5))
    compute(kv, [*range(10)])
    assert [event.group_idx for event in take(kv) if isinstance(event, BlockStored)] == [0, 1]


def test_the_form_on_the_wire() -> None:
    stored = BlockStored([b"h"], None, [1, 2], 2, None, "GPU", None)
    batch = KVEventBatch(1.5, [stored, BlockRemoved([b"h"], "GPU"), AllBlocksCleared()], 0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch)) == [
        1.5,
        [
            ["BlockStored", [b"h"], None, [1, 2], 2, None, "GPU", None, None, None],
            ["BlockRemoved", [b"h"], "GPU", None],
            ["AllBlocksCleared"],
        ],
        0,
    ]
