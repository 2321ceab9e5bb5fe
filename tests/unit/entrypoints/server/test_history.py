"""The history second by second."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.entrypoints.server.history import NUM_SECONDS, quantile
from quire.entrypoints.server.metrics import FINE, ServingMetrics
from quire.metrics.histogram import Histogram
from quire.protocol.stats import EngineStats
from tests.arrivals import arrive


@pytest.fixture
def tell() -> Callable[..., None]:
    """Gives a recorder the engine's figures at a time."""

    def give(metrics: ServingMetrics, now: float, running: int, queries: int = 0, hits: int = 0) -> None:
        metrics.on_engine_stats(EngineStats(running, 0, running / 10, 0, queries, hits, {}), now)

    return give


def test_what_happens_within_a_second_is_that_seconds(tell: Callable[..., None]) -> None:
    metrics = ServingMetrics()
    arrive(metrics, "a", 6, 9, 1, 99.0)
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
    assert first.latencies[0] == pytest.approx(0.1, rel=0.11)
    assert first.latencies[1] == pytest.approx(0.8, rel=0.11)
    assert (second.second, second.num_prompt_tokens, second.num_generation_tokens) == (101, 0, 1)
    assert (second.num_running, second.hit_rate) == (2, 0.75)
    assert second.latencies[0] == pytest.approx(0.001, rel=0.11)


def test_quiet_seconds_are_filled_in(tell: Callable[..., None]) -> None:
    metrics = ServingMetrics()
    arrive(metrics, "a", 6, 9, 1, 10.0)
    metrics.on_tokens("a", 0, 1, 10.0)
    tell(metrics, 10.5, running=3)
    metrics.advance(14.2)
    assert [s.second for s in metrics.history.seconds] == [10, 11, 12, 13]
    assert [s.num_generation_tokens for s in metrics.history.seconds] == [1, 0, 0, 0]
    assert [s.num_running for s in metrics.history.seconds] == [3, 3, 3, 3]
    assert metrics.history.seconds[1].latencies == [None] * 6
    metrics.advance(1e7)
    assert [s.second for s in metrics.history.seconds] == list(range(10**7 - NUM_SECONDS, 10**7))
    metrics.advance(14.2)  # nothing goes back
    assert len(metrics.history.seconds) == NUM_SECONDS


def test_errors_preemptions_and_times_to_the_first_token_are_a_seconds_own() -> None:
    metrics = ServingMetrics()
    metrics.on_engine_stats(EngineStats(), 10.0)
    arrive(metrics, "a", 6, 9, 1, 10.0)
    metrics.on_engine_stats(EngineStats(3, 5, 0.5, 2, 0, 0, {}), 10.1)
    metrics.on_scheduled("a", 10.2)
    metrics.on_tokens("a", 0, 1, 10.5)
    metrics.on_finished("a", ["error"], 0, 10.6)
    metrics.on_engine_stats(EngineStats(0, 1, 0.0, 2, 0, 0, {}), 10.7)
    metrics.advance(12.0)
    first, second = metrics.history.seconds
    assert (first.num_errors, first.num_preemptions) == (1, 2)
    assert (first.num_running, first.num_waiting) == (3, 5)  # at the most: a request may be shorter than a second
    assert first.latencies[:2] == [None, None]
    assert first.latencies[2:] == pytest.approx([0.5, 0.5, 0.2, 0.2], rel=0.11)
    assert (second.num_errors, second.num_preemptions, second.num_running, second.num_waiting) == (0, 0, 0, 1)
    assert second.latencies == [None] * 6


def test_an_engine_that_begins_anew_takes_nothing_back() -> None:
    metrics = ServingMetrics()
    for now, total in ((10.0, 7), (11.0, 0), (12.0, 1), (13.0, 1)):
        metrics.on_engine_stats(EngineStats(0, 0, 0.0, total, total, total, {}), now)
    assert [(s.num_preemptions, s.hit_rate) for s in metrics.history.seconds] == [(7, 1.0), (0, None), (1, 1.0)]


@given(st.lists(st.floats(0.000101, 80), min_size=1), st.floats(0, 1))
def test_quantiles_are_as_near_as_the_bounds(values: list[float], share: float) -> None:
    histogram = Histogram("name", "help", FINE)
    for value in values:
        histogram.observe(value)
    found = quantile(histogram.bounds, histogram.counts, share)
    exact = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    assert found == pytest.approx(exact, rel=0.11)


def test_quantiles_at_the_ends() -> None:
    assert quantile([1.0, 2.0], [0, 0, 0], 0.5) is None
    assert quantile([1.0, 2.0], [0, 0, 3], 0.5) == 2.0  # what lies beyond is not known
    assert quantile([1.0, 2.0], [4, 0, 0], 0.5) == 0.5
