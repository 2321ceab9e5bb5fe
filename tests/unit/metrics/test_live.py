"""The history second by second."""

from collections.abc import Callable

import pytest

from quire.metrics.live import NUM_SECONDS
from quire.metrics.serving import ServingMetrics
from quire.protocol.stats import EngineStats


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
