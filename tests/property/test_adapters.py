"""Requests with adapters in a random world: loads that take their time or fail, few places, aborts, few blocks.

The simulated worker refuses a step with a request whose adapter is not in its place; all outputs are those of the
request alone.
"""

import random

import pytest
from expectation import make_continuation
from simulated import FakeModel, SimulatedExecutor

from quire.config.scheduler import SchedulerConfig
from quire.engine.core import EngineCore
from quire.kvcache.manager import KVManager
from quire.protocol.cache import CacheGroup, CacheLayout
from quire.protocol.requests import AdapterRef, NewRequest, SamplingTask
from quire.protocol.step import SequenceOutput, StepPlan, StepResult
from quire.protocol.worker import AdapterReply, PlaceAdapters, WorkerCall, WorkerReply
from quire.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler

BROKEN = {7, 11}  # adapters that can't be loaded


class Worker(SimulatedExecutor):
    """Loads adapters after a while, and holds every step against the places."""

    def __init__(self, drawn: random.Random, num_places: int, max_in_flight: int) -> None:
        super().__init__(FakeModel(max_drafts=2, accuracy=0.6), max_in_flight)
        self.drawn, self.num_places = drawn, num_places
        self.places: dict[int, int] = {}  # place -> adapter
        self.num_loaded = 0

    def call(self, call: WorkerCall) -> list[WorkerReply]:
        if not isinstance(call, PlaceAdapters):
            return super().call(call)
        assert len({place for place, _ in call.wanted}) == len(call.wanted), "two adapters belong in one place"
        ready: list[int] = []
        failed: list[tuple[int, str]] = []
        for place, ref in call.wanted:
            assert 0 <= place < self.num_places
            if self.drawn.random() < 0.6:
                continue
            if ref.adapter_id in BROKEN:
                failed.append((ref.adapter_id, f"{ref.name} is broken"))
            else:
                self.places[place] = ref.adapter_id
                ready.append(ref.adapter_id)
                self.num_loaded += 1
        return [AdapterReply(ready, failed)]

    def submit(self, plan: StepPlan) -> None:
        known = self.requests | {request.request_id: request for request in plan.new_requests}
        for new in plan.new_sequences:
            ref = known[new.request_id].adapter
            assert ref is None or ref.adapter_id in self.places.values(), "its adapter is in no place"
        super().submit(plan)

    def collect(self, guide: object = None) -> StepResult:
        for row in self.rows.values():
            ref = row.request.adapter
            assert ref is None or ref.adapter_id in self.places.values() or self.is_ending(row.request), (
                "it lost its place"
            )
        return super().collect()

    def is_ending(self, request: NewRequest) -> bool:
        return not self.is_live(request.request_id)

    def is_live(self, request_id: str) -> bool:  # as the scheduler says; set by the test
        raise NotImplementedError


def make_core(drawn: random.Random, num_places: int, num_blocks: int, max_in_flight: int = 1) -> EngineCore:
    layout = CacheLayout(block_size=4, groups=[CacheGroup(layers=[0])], num_blocks=[num_blocks], max_model_len=32)
    config = SchedulerConfig(max_model_len=32, max_num_batched_tokens=24, max_num_seqs=6, max_num_drafts=2)
    scheduler = Scheduler(config, KVManager(layout), make_continuation)
    executor = Worker(drawn, num_places, max_in_flight)
    executor.is_live = scheduler.is_live  # type: ignore[method-assign]
    executor.initialize_cache(layout)
    executor.clock = lambda: 0.0
    return EngineCore(scheduler, executor, debug=True, num_places=num_places)


def make_request(number: int, drawn: random.Random) -> NewRequest:
    own = drawn.choice([0, 0, *range(1, 13)])
    task = SamplingTask(
        params=SamplingParams(n=(n := drawn.choice([1, 1, 2])), best_of=n),
        max_tokens=drawn.randint(1, 10),
        stop_token_ids=frozenset(),
        seed=number,
    )
    prompt = [drawn.randrange(3) for _ in range(drawn.randint(1, 14))]
    # The simulated model knows nothing of adapters: with the salt they draw other tokens, and share no block.
    adapter = AdapterRef(own, bytes([own]), f"adapter {own}", "") if own else None
    salt = str(own) if own else None
    return NewRequest(request_id=str(number), prompt_token_ids=prompt, task=task, adapter=adapter, cache_salt=salt)


def tokens_of(outputs: list[SequenceOutput], found: dict[tuple[str, int], list[int]]) -> None:
    for output in outputs:
        found.setdefault((output.request_id, output.sequence_index), []).extend(output.new_token_ids)


@pytest.mark.parametrize("seed", range(12))
def test_every_request_ends_with_its_own_tokens(seed: int) -> None:
    drawn = random.Random(seed)
    num_places = drawn.choice([1, 2, 5])
    core = make_core(drawn, num_places, drawn.choice([10, 30]), drawn.choice([1, 2]))
    requests = [make_request(number, drawn) for number in range(40)]
    found: dict[tuple[str, int], list[int]] = {}
    reasons: dict[tuple[str, int], str] = {}
    waiting, aborted, num_idle = requests.copy(), set[str](), 0
    while waiting or core.has_unfinished():
        outputs: list[SequenceOutput] = []
        while waiting and drawn.random() < 0.5:
            core.add(waiting.pop(0))
        if drawn.random() < 0.03 and len(waiting) < len(requests):
            one = drawn.choice(requests[: len(requests) - len(waiting)]).request_id
            if core.scheduler.is_live(one):
                aborted.add(one)
            outputs += core.abort(one)
        outputs += core.step()
        num_idle = 0 if outputs else num_idle + 1
        assert num_idle < 300, "nothing gets on"
        tokens_of(outputs, found)
        for output in outputs:
            if output.finish_reason is not None:
                key = output.request_id, output.sequence_index
                assert key not in reasons, "a sequence ends twice"
                reasons[key] = output.finish_reason
    assert not core.places.awaiting
    assert core.scheduler.kv.usage == 0.0
    for request in requests:
        assert isinstance(request.task, SamplingTask)
        keys = [(request.request_id, index) for index in range(request.task.num_sequences)]
        broken = request.adapter is not None and request.adapter.adapter_id in BROKEN
        if broken or request.request_id in aborted:
            assert {reasons[key] for key in keys} <= ({"error", "abort"} if broken else {"abort", "length"})
            continue
        assert {reasons[key] for key in keys} == {"length"}
        alone = make_core(random.Random(0), 1, 30)
        alone.add(request)
        expected: dict[tuple[str, int], list[int]] = {}
        while alone.has_unfinished():
            tokens_of(alone.step(), expected)
        assert {key: found[key] for key in keys} == expected


def test_nobody_waits_for_ever_while_others_keep_coming() -> None:
    """One place, an adapter that is asked for again and again, and one request for another."""
    core, drawn = make_core(random.Random(1), 1, 30), random.Random(2)
    number, other = 0, ""
    for step in range(400):
        if core.scheduler.stats().num_requests_running < 4 and len(core.places.awaiting) < 3:
            request = make_request(number, drawn)
            own = 2 if step == 20 else 1
            other = request.request_id if own == 2 else other
            task = request.task
            core.add(
                NewRequest(
                    request_id=request.request_id,
                    prompt_token_ids=[1, 2],
                    task=task,
                    adapter=AdapterRef(own, bytes([own])),
                )
            )
            number += 1
        core.step()
        if step > 20 and other and not core.scheduler.is_live(other):
            return
    pytest.fail("it still waits")
