"""What the recorder makes of a request's life, and of what does not belong to one."""

import itertools
import sys

import pytest

from quire.entrypoints.server.history import NUM_SECONDS
from quire.entrypoints.server.metrics import FINE, ServingMetrics, one_two_five
from quire.metrics.histogram import Histogram
from quire.protocol.requests import PoolingTask
from tests.arrivals import arrive


def histogram(metrics: ServingMetrics, name: str) -> Histogram:
    return next(h for h in metrics.histograms if h.name == f"vllm:{name}")


def seen(metrics: ServingMetrics, name: str) -> tuple[int, float]:
    """How many values a histogram has, and their sum."""
    return sum(histogram(metrics, name).counts), pytest.approx(histogram(metrics, name).total)  # type: ignore[return-value]


def test_a_request_with_one_sequence() -> None:
    metrics = ServingMetrics(512)
    arrive(metrics, "a", num_prompt_tokens=7, max_tokens=20, n=1, now=10.0)
    metrics.on_scheduled("a", 10.5)
    metrics.on_scheduled("a", 11.0)  # back from a preemption
    for now in (12.0, 12.25, 13.0):
        metrics.on_tokens("a", 0, 1, now)
    metrics.on_finished("a", ["stop"], num_cached_tokens=4, now=13.5)
    assert seen(metrics, "request_queue_time_seconds") == (1, 0.5)
    assert seen(metrics, "time_to_first_token_seconds") == (1, 2.0)
    assert seen(metrics, "request_prefill_time_seconds") == (1, 1.5)
    assert seen(metrics, "inter_token_latency_seconds") == (2, 1.0)
    assert seen(metrics, "request_time_per_output_token_seconds") == (1, 0.5)
    assert seen(metrics, "request_decode_time_seconds") == (1, 1.0)
    assert seen(metrics, "request_inference_time_seconds") == (1, 2.5)
    assert seen(metrics, "e2e_request_latency_seconds") == (1, 3.5)
    assert seen(metrics, "request_prompt_tokens") == (1, 7)
    assert seen(metrics, "request_generation_tokens") == (1, 3)
    assert seen(metrics, "request_params_n") == (1, 1)
    assert seen(metrics, "request_params_max_tokens") == (1, 20)
    assert (metrics.num_prompt_tokens, metrics.num_cached_prompt_tokens, metrics.num_generation_tokens) == (7, 4, 3)
    assert metrics.finished == {"stop": 1, "length": 0, "abort": 0, "error": 0}
    assert not metrics._requests


def test_sequences_of_one_request_are_timed_apart() -> None:
    metrics = ServingMetrics()
    arrive(metrics, "a", 5, 9, n=2, now=0.0)
    metrics.on_scheduled("a", 0.0)
    metrics.on_tokens("a", 0, 1, 1.0)
    metrics.on_tokens("a", 1, 1, 1.0)
    metrics.on_tokens("a", 0, 1, 2.0)
    metrics.on_tokens("a", 1, 2, 4.0)  # two at once, as drafts bring them
    metrics.on_finished("a", ["stop", "length"], 0, 4.0)
    assert metrics.num_prompt_tokens == 5
    assert seen(metrics, "time_to_first_token_seconds") == (1, 1.0)
    assert seen(metrics, "inter_token_latency_seconds") == (2, 4.0)
    assert seen(metrics, "request_time_per_output_token_seconds") == (2, 2.5)
    assert seen(metrics, "request_generation_tokens") == (1, 5)
    assert seen(metrics, "request_max_num_generation_tokens") == (1, 3)
    assert (metrics.finished["stop"], metrics.finished["length"]) == (1, 1)


def test_the_token_of_a_pooled_prompt_is_none() -> None:
    metrics = ServingMetrics()
    arrive(metrics, "a", 5, 1, n=1, now=0.0, kind=PoolingTask)
    metrics.on_scheduled("a", 0.5)
    metrics.on_tokens("a", 0, 1, 1.0)
    metrics.on_finished("a", ["stop"], 0, 1.0)
    assert (metrics.num_prompt_tokens, metrics.num_generation_tokens) == (5, 0)
    assert seen(metrics, "time_to_first_token_seconds") == (1, 1.0)
    assert seen(metrics, "request_generation_tokens") == (1, 0)
    assert seen(metrics, "request_prefill_kv_computed_tokens") == (1, 5)


def test_a_request_aborted_before_it_ran() -> None:
    metrics = ServingMetrics()
    arrive(metrics, "a", 5, 9, 1, now=0.0)
    metrics.on_finished("a", ["abort"], 0, now=2.0)
    assert metrics.finished["abort"] == 1
    assert seen(metrics, "e2e_request_latency_seconds") == (1, 2.0)
    assert metrics.num_prompt_tokens == 0
    for name in ("request_queue_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds"):
        assert seen(metrics, name)[0] == 0


def test_unknown_requests_change_nothing() -> None:
    metrics = ServingMetrics()
    arrive(metrics, "a", 5, 9, 1, 0.0)
    metrics.on_finished("a", ["stop"], 0, 1.0)
    before = [list(h.counts) for h in metrics.histograms], dict(metrics.finished)
    metrics.on_scheduled("a", 2.0)
    metrics.on_tokens("a", 0, 1, 2.0)
    metrics.on_finished("a", ["stop"], 0, 2.0)
    metrics.on_finished("never", ["error"], 0, 2.0)
    assert ([list(h.counts) for h in metrics.histograms], dict(metrics.finished)) == before
    assert metrics.num_generation_tokens == 0


def test_tokens_of_a_step_are_counted_together() -> None:
    metrics = ServingMetrics()
    for name in "ab":
        arrive(metrics, name, 10, 9, 1, 0.0)
    metrics.on_tokens("a", 0, 1, 1.0)  # with the prompt: 11
    metrics.on_tokens("a", 0, 1, 2.0)
    metrics.on_tokens("b", 0, 1, 2.0)  # 12 in the second step
    metrics.advance(3.0)
    metrics.advance(4.0)
    assert seen(metrics, "iteration_tokens_total") == (2, 23)


def test_memory_is_bounded_by_live_requests() -> None:
    metrics = ServingMetrics()

    def run(numbers: range) -> None:
        now = itertools.count(1.0, 0.5)
        for number in numbers:
            arrive(metrics, str(number), 5, 9, 1, next(now))
            metrics.on_tokens(str(number), 0, 1, next(now))
            metrics.on_finished(str(number), ["stop"], 0, next(now))

    def size() -> int:
        parts = [metrics._requests, metrics.finished, *(h.counts for h in metrics.histograms)]
        return sum(map(sys.getsizeof, parts))

    run(range(1000))
    before = size()
    run(range(1000, 5000))
    assert size() == before
    assert len(metrics.history.seconds) == NUM_SECONDS
    assert not metrics._requests


def test_bounds() -> None:
    assert one_two_five(100) == [1, 2, 5, 10, 20, 50, 100]
    assert one_two_five(3) == [1, 2]
    assert FINE[::24] == pytest.approx([1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0])
    assert FINE[-2] < 80 < FINE[-1]
