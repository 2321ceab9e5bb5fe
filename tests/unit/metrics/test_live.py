"""The history second by second, and the block map."""

from collections.abc import Callable

import pytest

from quire.metrics.live import NUM_SECONDS, BlockMap, CellGroup
from quire.metrics.serving import ServingMetrics
from quire.protocol.stats import BlockGroup, EngineStats


@pytest.fixture
def tell() -> Callable[..., None]:
    """Gives a recorder the engine's figures at a time."""

    def give(metrics: ServingMetrics, now: float, running: int, queries: int = 0, hits: int = 0) -> None:
        metrics.on_engine_stats(EngineStats(running, 0, running / 10, 0, queries, hits, {}), now)

    return give


def test_what_happens_within_a_second_is_that_seconds(tell: Callable[..., None]) -> None:
    metrics = ServingMetrics()
    metrics.on_arrival("a", 6, 9, 1, 99.0)
    tell(metrics, 100.1, running=1, queries=8, hits=2)
    metrics.on_tokens("a", 0, 1, 100.1)
    metrics.on_tokens("a", 0, 1, 100.2)
    metrics.on_tokens("a", 0, 1, 100.999)
    tell(metrics, 101.0, running=2, queries=16, hits=8)
    metrics.on_tokens("a", 0, 1, 101.0)
    tell(metrics, 102.5, running=0, queries=16, hits=8)
    first, second = metrics.history.seconds
    assert (first.second, first.num_prompt_tokens, first.num_generation_tokens) == (100, 6, 3)
    assert (first.num_running, first.kv_cache_usage, first.hit_rate) == (1, 0.1, 0.25)
    assert first.itl_p50 == pytest.approx(0.1, rel=0.11)
    assert first.itl_p99 == pytest.approx(0.8, rel=0.11)
    assert (second.second, second.num_prompt_tokens, second.num_generation_tokens) == (101, 0, 1)
    assert (second.num_running, second.hit_rate) == (2, 0.75)
    assert second.itl_p50 == pytest.approx(0.001, rel=0.11)


def test_quiet_seconds_are_filled_in(tell: Callable[..., None]) -> None:
    metrics = ServingMetrics()
    metrics.on_arrival("a", 6, 9, 1, 10.0)
    metrics.on_tokens("a", 0, 1, 10.0)
    tell(metrics, 10.5, running=3)
    metrics.advance(14.2)
    assert [s.second for s in metrics.history.seconds] == [10, 11, 12, 13]
    assert [s.num_generation_tokens for s in metrics.history.seconds] == [1, 0, 0, 0]
    assert [s.num_running for s in metrics.history.seconds] == [3, 3, 3, 3]
    assert metrics.history.seconds[1].itl_p50 is None
    metrics.advance(1e7)
    assert [s.second for s in metrics.history.seconds] == list(range(10**7 - NUM_SECONDS, 10**7))
    metrics.advance(14.2)  # nothing goes back
    assert len(metrics.history.seconds) == NUM_SECONDS


def test_small_pools_are_shown_block_by_block() -> None:
    assert BlockMap.of(bytes([0, 1, 2, 2])) == BlockMap(1, 1, 2, 1, bytes([0x00, 0x0F, 0xF0, 0xF0]))
    assert BlockMap.of(bytes(3)) == BlockMap(3, 0, 0, 1, bytes(3))
    assert BlockMap.of(b"") == BlockMap(0, 0, 0, 1, b"")


def test_cells_of_large_pools_hold_shares() -> None:
    blocks = bytearray(100_000)
    blocks[0:25], blocks[25:37], blocks[99_999:] = b"\2" * 25, b"\1" * 12, b"\2"
    shown = BlockMap.of(bytes(blocks))
    assert shown.blocks_per_cell == 25
    assert len(shown.cells) == 4000
    assert (shown.num_used, shown.num_cached, shown.num_free) == (26, 12, 99_962)
    assert shown.cells[0] == 0xF0
    assert shown.cells[1] == 0x08  # 12 of 25
    assert set(shown.cells[2:-1]) == {0}
    assert shown.cells[-1] == 0x10  # one used block is never lost


def test_no_cell_stands_for_two_groups() -> None:
    groups = [BlockGroup(3), BlockGroup(2, window=8)]
    shown = BlockMap.of(bytes([2, 2, 2, 0, 1]), groups)
    assert shown == BlockMap(
        1, 1, 3, 1, bytes([0xF0, 0xF0, 0xF0, 0, 0x0F]), [CellGroup(0, 3, None), CellGroup(3, 2, 8)]
    )
    shown = BlockMap.of(b"\2" * 5_001 + bytes(3_000), [BlockGroup(5_001), BlockGroup(3_000, window=8)])
    assert shown.blocks_per_cell == 2
    assert shown.cells == b"\xf0" * 2_501 + bytes(1_500)
    assert shown.groups == [CellGroup(0, 5_001, None), CellGroup(2_501, 3_000, 8)]


@pytest.mark.parametrize("num_blocks", [4_095, 4_096, 4_097, 8_193])
def test_the_last_cell_may_stand_for_fewer(num_blocks: int) -> None:
    shown = BlockMap.of(b"\2" * num_blocks)
    assert set(shown.cells) == {0xF0}
    assert len(shown.cells) <= 4_096
    assert (len(shown.cells) - 1) * shown.blocks_per_cell < num_blocks <= len(shown.cells) * shown.blocks_per_cell
