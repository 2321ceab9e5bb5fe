"""What a step costs must not grow with those that wait: counted in bytecodes, so that no clock decides."""

from collections.abc import Callable
from typing import Any

import pytest

from quire.kvcache.manager import KVManager
from quire.protocol.step import Sampling, SequenceResult, StepPlan, StepResult
from quire.scheduler.policies.registry import POLICIES

Count = Callable[[Callable[[], Any]], int]


def cost_of_a_step(d: Any, count_bytecodes: Count) -> int:
    """Of planning, and of taking in what is drawn."""
    plans: list[StepPlan] = []
    cost = count_bytecodes(lambda: plans.append(d.scheduler.schedule(d.now)))
    (plan,) = plans
    drawn = [SequenceResult([7] if item.sampling is Sampling.DRAW else []) for item in plan.scheduled]
    result = StepResult(step_id=plan.step_id, results=drawn)
    cost += count_bytecodes(lambda: d.scheduler.update(plan, result, d.now))
    return cost + count_bytecodes(d.scheduler.stats)


PREFIX = list(range(1_000, 1_100))


def test_those_that_await_a_prefix_cost_a_step_nothing(driver, count_bytecodes: Count) -> None:
    costs = []
    for num_readers in (3, 300):
        d = driver(max_model_len=200, max_num_batched_tokens=20, long_prefill_token_threshold=10)
        d.add("writer", [*PREFIX, 1])
        d.step()
        for number in range(num_readers):
            d.add(f"reader {number}", [*PREFIX, 2, number])
        d.step()
        assert d.waiting_reasons() == {"prefix": num_readers}
        costs.append(cost_of_a_step(d, count_bytecodes))
        assert d.waiting_reasons() == {"prefix": num_readers}, "one part of ten is computed"
    assert costs[0] == costs[1]


def test_each_reader_of_a_prefix_looks_it_up_twice(driver, monkeypatch: pytest.MonkeyPatch) -> None:
    num_lookups = 0
    match_prefix = KVManager.match_prefix

    def counted(self: KVManager, table: Any) -> Any:
        nonlocal num_lookups
        num_lookups += 1
        return match_prefix(self, table)

    monkeypatch.setattr(KVManager, "match_prefix", counted)
    d = driver(
        num_blocks=1_000, max_model_len=200, max_num_batched_tokens=30, max_num_seqs=20, long_prefill_token_threshold=10
    )
    d.add("writer", [*PREFIX, 1])
    d.step()
    for number in range(10):
        d.add(f"reader {number}", [*PREFIX, 2, number], max_tokens=2)
    num_lookups = 0
    while d.scheduler.has_unfinished():
        d.step()
        d.scheduler.check_integrity()
    assert num_lookups <= 2 * 10 + 20, "when it comes, when the prefix is there, and as first in line"
    assert d.prefix_cache() == (101 + 10 * 102, 10 * 100)


def test_readers_go_on_when_the_writer_is_gone(driver) -> None:
    d = driver(max_model_len=200, max_num_batched_tokens=30, long_prefill_token_threshold=10)
    d.add("writer", [*PREFIX, 1])
    d.step()
    d.add("a", [*PREFIX, 2], max_tokens=2)
    d.add("b", [*PREFIX, 3], max_tokens=2)
    d.add("gone", [*PREFIX, 4], max_tokens=2)
    d.step()
    assert d.waiting_reasons() == {"prefix": 3}
    d.scheduler.abort("writer")
    d.scheduler.abort("gone")
    d.step()
    assert d.waiting_reasons() == {"prefix": 1}, "a computes it now, b awaits a"
    while d.scheduler.has_unfinished():
        d.step()
        d.scheduler.check_integrity()


@pytest.mark.parametrize("policy", POLICIES)
def test_those_that_wait_for_a_place_cost_a_step_nothing(driver, count_bytecodes: Count, policy: str) -> None:
    costs = []
    for num_waiting in (3, 300):
        d = driver(max_num_seqs=2, policy=policy)
        for number in range(2 + num_waiting):
            d.add(str(number), 5, client=str(number % 3))
        d.step()
        assert d.waiting_reasons() == {"capacity": num_waiting}
        costs.append(cost_of_a_step(d, count_bytecodes))
    assert costs[0] == costs[1]


def test_a_step_costs_in_proportion_to_those_that_it_computes(driver, count_bytecodes: Count) -> None:
    costs = []
    for num_running in (10, 20, 40):
        d = driver(num_blocks=1_000, max_num_seqs=100, max_num_batched_tokens=1_000)
        for number in range(num_running):
            d.add(str(number), 5)
        d.step()
        costs.append(cost_of_a_step(d, count_bytecodes))
    assert costs[2] - costs[1] == 2 * (costs[1] - costs[0]) < 20 * 400
