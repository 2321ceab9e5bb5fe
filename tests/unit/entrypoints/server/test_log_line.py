"""The throughput line: what it says, and when it keeps silent."""

import pytest

from quire.entrypoints.server.log_line import ThroughputLine
from quire.entrypoints.server.metrics import ServingMetrics
from quire.protocol.stats import EngineStats
from tests.arrivals import arrive


def stats(running: int = 0, queries: int = 0, hits: int = 0, **reasons: int) -> EngineStats:
    return EngineStats(running, sum(reasons.values()), 0.341, 0, queries, hits, reasons)


@pytest.fixture
def clock() -> list[float]:
    """The time, which a test may set."""
    return [100.0]


def test_a_busy_interval(clock: list[float]) -> None:
    metrics = ServingMetrics()
    log = ThroughputLine(metrics, 100.0)
    arrive(metrics, "a", 8124, 9, 1, 100.0)
    metrics.on_tokens("a", 0, 2510, 105.0)
    clock[0] = 110.0
    assert log.next(stats(12, queries=1000, hits=510, blocks=1, order=2), clock[0]) == (
        "prompt 812.4 tokens/s, generation 251.0 tokens/s; "
        "running 12, waiting 3 (1 for KV blocks, 2 for those before); KV cache 34.1% used; prefix cache hits 51.0%"
    )
    clock[0] = 112.0
    metrics.on_tokens("a", 0, 5, 111.0)
    assert log.next(stats(12, queries=1000, hits=510), clock[0]) == (
        "prompt 0.0 tokens/s, generation 2.5 tokens/s; running 12, waiting 0; KV cache 34.1% used"
    )


def test_silent_when_idle_after_one_last_line(clock: list[float]) -> None:
    metrics = ServingMetrics()
    log = ThroughputLine(metrics, 100.0)
    assert log.next(stats(), clock[0]) is None
    assert log.next(stats(1), clock[0]) is not None
    last = log.next(stats(), clock[0])
    assert last is not None
    assert "running 0, waiting 0" in last
    assert log.next(stats(), clock[0]) is None
    arrive(metrics, "a", 5, 9, 1, clock[0])
    metrics.on_tokens("a", 0, 1, clock[0])
    metrics.on_finished("a", ["stop"], 0, clock[0])
    assert log.next(stats(), clock[0]) is not None  # it began and ended between two lines
    assert log.next(stats(), clock[0]) is None


def test_reasons_without_words_are_named() -> None:
    line = ThroughputLine(ServingMetrics(), 100.0).next(stats(elsewhere=2), 101.0)
    assert line is not None
    assert "waiting 2 (2 elsewhere)" in line
