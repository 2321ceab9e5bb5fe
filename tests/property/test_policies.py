"""What every scheduling policy must keep to: nobody starves, nobody who is ready is overtaken, no step is wasted.

Beside the policies there are, one for tests whose keys change with each step: the client that was served least comes
first. A shared prefix, whose readers must wait for it, is part of each load.
"""

import random
from collections.abc import Iterable
from typing import Any

import pytest

from quire.config.scheduler import SchedulerConfig
from quire.engine.core import EngineCore
from quire.executor.simulated import FakeModel, SimulatedExecutor
from quire.kvcache.manager import KVManager
from quire.protocol.cache import CacheGroup, CacheLayout
from quire.protocol.requests import NewRequest, SamplingTask
from quire.protocol.step import StepPlan
from quire.sampling_params import SamplingParams
from quire.scheduler.policies.base import Policy
from quire.scheduler.policies.registry import POLICIES
from quire.scheduler.scheduler import Scheduler


class FairShare(Policy):
    """The client with the fewest tokens so far comes first."""

    def __init__(self) -> None:
        self._served: dict[str | None, int] = {}
        self._requests: dict[str | None, list[str]] = {}

    def key(self, request: NewRequest, order: int, now: float) -> tuple[int, int]:
        known = self._requests.setdefault(request.client, [])
        if request.request_id not in known:
            known.append(request.request_id)
        return (self._served.get(request.client, 0), order)

    def on_served(self, request: NewRequest, num_tokens: int) -> Iterable[str]:
        self._served[request.client] = self._served.get(request.client, 0) + num_tokens
        return self._requests[request.client]


@pytest.fixture(params=["fcfs", "priority", "fair"])
def policy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(POLICIES, "fair", FairShare)
    return request.param


class Watched(SimulatedExecutor):
    """Looks at each plan beside the queues that it was made from."""

    def __init__(self, max_in_flight: int) -> None:
        super().__init__(FakeModel(), max_in_flight)
        self.scheduler: Scheduler
        self.config: SchedulerConfig
        self.served: dict[int, int] = {}  # sequence -> step of its last turn
        self.num_steps = 0

    def submit(self, plan: StepPlan) -> None:
        planner, live = self.scheduler._planner, self.scheduler._outcomes.live
        self.num_steps += 1
        waiting = planner.waiting.items
        for new in plan.new_sequences:
            assert all(live[new.sequence_id].key < other.key for other in waiting), "overtaken by a later one"
        reason = planner._reason
        if waiting:
            # Whoever is ready waits for something that is really lacking.
            lacks = {
                "budget": plan.num_tokens == self.config.max_num_batched_tokens,
                "capacity": len(planner.running) == planner.max_running,
                "blocks": True,  # how many is the KV manager's to say; its tests do
            }
            assert reason is not None
            assert lacks[reason], f"{reason} was not lacking"
        scheduled = {item.sequence_id for item in plan.scheduled}
        if plan.num_tokens < self.config.max_num_batched_tokens:
            idle = [s for s in planner.running if s.sequence_id not in scheduled and not s.num_in_flight]
            assert not idle, "somebody runs, could be computed, and is not"
        super().submit(plan)


def make(policy: str, max_in_flight: int = 1, **changes: int) -> tuple[EngineCore, Watched]:
    options: dict[str, Any] = {"max_model_len": 128, "max_num_batched_tokens": 16, "max_num_seqs": 4} | changes
    num_blocks = options.pop("num_blocks", 40)
    config = SchedulerConfig(policy=policy, **options)
    layout = CacheLayout(
        block_size=4, groups=[CacheGroup(layers=[0])], num_blocks=[num_blocks], max_model_len=config.max_model_len
    )
    executor = Watched(max_in_flight)
    executor.initialize_cache(layout)
    executor.scheduler, executor.config = Scheduler(config, KVManager(layout)), config
    return EngineCore(executor.scheduler, executor, clock=lambda: float(executor.num_steps)), executor


def add(core: EngineCore, name: str, prompt: list[int], max_tokens: int = 4, **fields: object) -> None:
    task = SamplingTask(
        params=SamplingParams(max_tokens=max_tokens), max_tokens=max_tokens, stop_token_ids=frozenset(), seed=1
    )
    core.add(NewRequest(request_id=name, prompt_token_ids=prompt, task=task, **fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_no_inversion_no_starvation_no_idle_budget(policy: str, max_in_flight: int, seed: int) -> None:
    rng = random.Random(seed)
    core, _ = make(policy, max_in_flight, num_blocks=rng.choice((24, 40)))
    shared = [rng.randrange(30) for _ in range(40)]
    ended: set[str] = set()
    for number in range(60):
        prompt = shared[: rng.choice((0, 20, 40))] + [rng.randrange(30) for _ in range(rng.randrange(1, 12))]
        fields = {"client": rng.choice("abc"), "priority": rng.randrange(3), "arrival_time": float(number)}
        add(core, str(number), prompt, rng.randrange(1, 8), **fields)
        for _ in range(rng.randrange(4)):
            ended |= {output.request_id for output in core.step() if output.finish_reason}
            core.check_integrity()
    # No more arrivals: everyone gets to the end, and soon.
    for _ in range(600):
        if not core.has_unfinished():
            break
        ended |= {output.request_id for output in core.step() if output.finish_reason}
    assert ended == {str(number) for number in range(60)}


def test_a_reader_of_a_prefix_that_is_being_computed_holds_nobody_up(policy: str) -> None:
    """The case that once waited 79 steps: half of each budget was unused, and five tokens could not be computed."""
    core, executor = make(
        policy, max_model_len=2048, max_num_batched_tokens=64, num_blocks=2048, long_prefill_token_threshold=16
    )
    shared = [i % 37 for i in range(1200)]
    add(core, "first", [*shared, 1], client="a", arrival_time=0.0)
    core.step()
    add(core, "second", [*shared, 2], client="b", arrival_time=1.0)
    add(core, "unrelated", [5, 4, 3, 2, 1], max_tokens=1, client="c", arrival_time=2.0)
    outputs = core.step()
    assert [output.request_id for output in outputs if output.finish_reason] == ["unrelated"]
    assert executor.scheduler.stats().waiting_reasons == {"prefix": 1}
    while core.has_unfinished():
        outputs = core.step()
    assert executor.num_steps < 90, "the second shares what the first computed"


def test_a_client_that_was_served_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "fair", FairShare)
    core, executor = make("fair", max_num_seqs=1)
    for i in range(4):
        add(core, f"greedy{i}", [i] * 8, max_tokens=2, client="greedy")
    core.step()
    add(core, "modest", [9] * 8, max_tokens=2, client="modest")
    order: list[str] = []
    while core.has_unfinished():
        order += [output.request_id for output in core.step() if output.finish_reason]
    assert order[:2] == ["greedy0", "modest"]
    assert executor.scheduler.stats().num_preemptions_total == 0
