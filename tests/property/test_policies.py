"""What every scheduling policy must keep to: nobody starves, nobody who is ready is overtaken, no step is wasted.

And what each promises beyond that: bounded differences between clients, bounded ageing, targets that are met or refused
at once. A shared prefix, whose readers must wait for it, is part of each load.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from simulated import FakeModel, SimulatedExecutor
from world import check_order

from quire.config.scheduler import PolicyOptions, SchedulerConfig
from quire.engine.core import EngineCore
from quire.errors import InvalidRequestError, OverloadedError
from quire.kvcache.manager import KVManager
from quire.protocol.cache import CacheGroup, CacheLayout
from quire.protocol.requests import NewRequest, SamplingTask
from quire.protocol.step import StepPlan
from quire.sampling_params import SamplingParams
from quire.scheduler.policies.registry import POLICIES
from quire.scheduler.reasons import why
from quire.scheduler.scheduler import Scheduler

FIXED, PER_TOKEN = 0.01, 0.001  # seconds of a simulated step


@pytest.fixture(params=list(POLICIES))
def policy(request: pytest.FixtureRequest) -> str:
    return request.param


class Watched(SimulatedExecutor):
    """Looks at each plan beside the queues that it was made from, and lets a clock go on."""

    def __init__(self, max_in_flight: int) -> None:
        super().__init__(FakeModel(), max_in_flight)
        self.scheduler: Scheduler
        self.config: SchedulerConfig
        self.num_steps = 0
        self.now = 0.0

    def submit(self, plan: StepPlan) -> None:
        planner = self.scheduler._planner
        running = {sequence.sequence_id: sequence for sequence in planner.running}
        self.num_steps += 1
        self.now += FIXED + PER_TOKEN * plan.num_tokens
        for new in plan.new_sequences:
            check_order(planner, running[new.sequence_id])
        reason, budget = planner.reason, self.config.max_num_batched_tokens
        if len(planner.waiting):
            # Whoever is ready waits for something that is really lacking.
            lacks = {
                "budget": plan.num_tokens == planner.policy.budget(budget, len(planner.running)),
                "capacity": len(planner.running) == planner.max_running,
                "blocks": True,  # how many is the KV manager's to say; its tests do
            }
            assert reason is not None
            assert lacks[reason], f"{reason} was not lacking"
            for sequence in planner.waiting:
                assert len(why(planner, self.scheduler.kv, sequence)) > 30, "no numbers"
        scheduled = {item.sequence_id for item in plan.scheduled}
        if plan.num_tokens < planner.policy.budget(budget, len(planner.running)):
            idle = [s for s in planner.running if s.sequence_id not in scheduled and not s.num_in_flight]
            assert not idle, "somebody runs, could be computed, and is not"
        super().submit(plan)


def make(policy: str, max_in_flight: int = 1, **changes: Any) -> tuple[EngineCore, Watched]:
    options: dict[str, Any] = {"max_model_len": 128, "max_num_batched_tokens": 16, "max_num_seqs": 4} | changes
    num_blocks = options.pop("num_blocks", 40)
    config = SchedulerConfig(policy=policy, **options)
    layout = CacheLayout(
        block_size=4, groups=[CacheGroup(layers=[0])], num_blocks=[num_blocks], max_model_len=config.max_model_len
    )
    executor = Watched(max_in_flight)
    executor.initialize_cache(layout)
    executor.scheduler, executor.config = Scheduler(config, KVManager(layout)), config
    executor.clock = lambda: executor.now
    return EngineCore(executor.scheduler, executor), executor


def add(core: EngineCore, name: str, prompt: list[int], max_tokens: int = 4, **fields: object) -> None:
    task = SamplingTask(
        params=SamplingParams(max_tokens=max_tokens), max_tokens=max_tokens, stop_token_ids=frozenset(), seed=1
    )
    core.add(NewRequest(request_id=name, prompt_token_ids=prompt, task=task, **fields))  # type: ignore[arg-type]


def ended_in(core: EngineCore) -> list[str]:
    """Who ends in a step."""
    return [output.request_id for output in core.step() if output.finish_reason]


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_no_inversion_no_starvation_no_idle_budget(policy: str, max_in_flight: int, seed: int) -> None:
    rng = random.Random(seed)
    core, _ = make(policy, max_in_flight, num_blocks=rng.choice((24, 40)))
    shared = [rng.randrange(30) for _ in range(40)]
    ended: set[str] = set()
    for number in range(60):
        prompt = shared[: rng.choice((0, 20, 40))] + [rng.randrange(30) for _ in range(rng.randrange(1, 12))]
        fields: dict[str, Any] = {"client": rng.choice("abc"), "priority": rng.randrange(3)}
        if rng.random() < 0.2:
            fields["ttft_target"] = 1000.0
        add(core, str(number), prompt, rng.randrange(1, 8), arrival_time=float(number), **fields)
        for _ in range(rng.randrange(4)):
            ended |= set(ended_in(core))
            core.check_integrity()
    # No more arrivals: everyone gets to the end, and soon.
    for _ in range(600):
        if not core.has_unfinished():
            break
        ended |= set(ended_in(core))
    assert ended == {str(number) for number in range(60)}


def test_preemption_follows_the_order_and_never_goes_both_ways(policy: str) -> None:
    rng = random.Random(3)
    chosen = POLICIES[policy](PolicyOptions())
    requests = [
        NewRequest(
            request_id=str(i),
            prompt_token_ids=[1] * rng.randrange(1, 20),
            task=SamplingTask(params=SamplingParams(), max_tokens=5, stop_token_ids=frozenset(), seed=1),
            arrival_time=rng.random(),
            priority=rng.randrange(3),
            client=rng.choice("ab"),
            ttft_target=rng.choice((None, 0.2, 80.0)),
        )
        for i in range(40)
    ]
    pairs = [
        (chosen.key(a, i), chosen.key(b, j))
        for i, a in enumerate(requests)
        for j, b in enumerate(requests)
        if chosen.preempts(a, b)
    ]
    assert all(waiting < running for waiting, running in pairs)
    assert bool(pairs) == (policy in ("priority", "deadline"))


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
    assert ended_in(core) == ["unrelated"]
    assert executor.scheduler.stats().waiting_reasons == {"prefix": 1}
    while core.has_unfinished():
        core.step()
    assert executor.num_steps < 90, "the second shares what the first computed"


# A fair share.


def test_a_client_that_was_served_gives_way() -> None:
    core, executor = make("fair", max_num_seqs=1)
    for i in range(4):
        add(core, f"greedy{i}", [i] * 8, max_tokens=2, client="greedy")
    core.step()
    add(core, "modest", [9] * 8, max_tokens=2, client="modest")
    order: list[str] = []
    while core.has_unfinished():
        order += ended_in(core)
    assert order[:2] == ["greedy0", "modest"]
    assert executor.scheduler.stats().num_preemptions_total == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_blocks", [26, 400])
def test_backlogged_clients_are_served_alike(seed: int, num_blocks: int) -> None:
    """The bound of the VTC paper, of the counters and of what they count: whatever sizes a client's requests have."""
    rng = random.Random(seed)
    core, executor = make("fair", num_blocks=num_blocks, max_num_seqs=6, max_num_batched_tokens=32)
    planner, sizes = executor.scheduler._planner, {"long": (60, 8), "short": (4, 3), "talker": (3, 40)}
    options, number, given = PolicyOptions(), 0, dict.fromkeys(sizes, 0.0)
    longest, most_output = 60, 40 * 6
    bound = max(options.fair_input_weight * longest, options.fair_output_weight * most_output)
    for step in range(600):
        waiting = Counter(sequence.group.lane for sequence in planner.waiting)
        for client, (num_prompt, num_output) in sizes.items():
            while waiting[client] < 3:
                waiting[client] += 1
                number += 1
                prompt = [rng.randrange(1000) for _ in range(rng.randrange(1, num_prompt + 1))]
                add(core, f"{client}/{number}", prompt, rng.randrange(1, num_output + 1), client=client)
        for output in core.step():
            client = output.request_id.split("/")[0]
            given[client] += len(output.new_token_ids) * options.fair_output_weight
        if step > 50:
            counters = [planner.policy.rank(client) for client in sizes]
            assert max(counters) - min(counters) <= bound
    assert min(given.values()) > 0
    assert executor.scheduler.stats().num_preemptions_total > 0 or num_blocks == 400


def test_idle_time_is_not_saved_up() -> None:
    core, executor = make("fair", max_num_seqs=1)
    for i in range(30):
        add(core, f"busy{i}", [i] * 8, max_tokens=4, client="busy")
    for _ in range(60):
        core.step()
    for i in range(10):
        add(core, f"late{i}", [50 + i] * 8, max_tokens=4, client="late")
    order: list[str] = []
    while core.has_unfinished():
        order += ended_in(core)
    clients = [name[:4] for name in order if "9" not in name]
    first = clients[clients.index("late") :][:10]
    assert 4 <= first.count("late") <= 6, "they take turns: nobody is owed what it never asked for"


def test_a_clients_counter_survives_other_options_and_what_was_idle_longest_is_forgotten() -> None:
    core, executor = make("fair")
    for i in range(3):
        add(core, str(i), [i] * 8, client=f"c{i % 2}")
    core.step()
    fair: Any = executor.scheduler._planner.policy
    ranks = [fair.rank(f"c{i}") for i in range(2)]
    core.set_limits({"fair_output_weight": 3.0})
    assert executor.scheduler._planner.policy is fair
    assert fair.options.fair_output_weight == 3.0
    assert [fair.rank(f"c{i}") for i in range(2)] == ranks != [0.0, 0.0]
    task = SamplingTask(params=SamplingParams(), max_tokens=1, stop_token_ids=frozenset(), seed=1)
    for i in range(20_000):
        request = NewRequest(request_id=str(i), prompt_token_ids=[1], task=task, client=str(i))
        fair.on_added(request, False, None)
        fair.on_admitted(request, 1)
        fair.on_ended(request)
    assert len(fair._counters) < 5000


# Shortest first.


def test_the_shortest_comes_first_until_a_long_one_has_aged() -> None:
    core, _ = make("shortest", max_num_seqs=1, policy_options=PolicyOptions(ageing_rate=100.0))
    add(core, "running", [1], max_tokens=2)
    core.step()
    add(core, "long", [2] * 40, max_tokens=40, arrival_time=0.0)
    add(core, "short", [3] * 4, max_tokens=4, arrival_time=0.5)
    add(core, "later", [4] * 4, max_tokens=4, arrival_time=0.9)
    order: list[str] = []
    while core.has_unfinished():
        order += ended_in(core)
    assert order == ["running", "short", "long", "later"]


@pytest.mark.parametrize("seed", range(3))
def test_what_starves_a_long_request_is_bounded(seed: int) -> None:
    """Short ones keep coming, more than fit: what comes within size / ageing_rate may go first."""
    rng = random.Random(seed)
    options = PolicyOptions(ageing_rate=50.0)
    core, executor = make("shortest", max_num_seqs=2, policy_options=options)
    add(core, "long", [7] * 60, max_tokens=40, arrival_time=0.0)
    for i in range(2):
        add(core, f"first{i}", [i], max_tokens=1)
    arrivals: dict[str, float] = {}
    admitted: float | None = None
    for number in range(2000):
        arrivals[str(number)] = executor.now
        add(core, str(number), [rng.randrange(99)] * 3, rng.randrange(1, 5), arrival_time=executor.now)
        core.step()
        running = {s.group.request_id for s in executor.scheduler._planner.running}
        if "long" in running:
            admitted = executor.now
            break
    assert admitted is not None, "it starves"
    gone = set(arrivals) - executor.scheduler._outcomes.groups.keys()
    assert all(arrivals[name] <= 100 / options.ageing_rate for name in gone)


# Deadlines.


@dataclass
class Seen:
    """When a request came, when its tokens did, and what it was promised."""

    arrival: float
    ttft: float
    tpot: float
    tokens: list[float] = field(default_factory=list)


def run_load(seed: int, per_second: float, num_requests: int = 150) -> tuple[dict[str, Seen], int, int]:
    """Requests at a rate, each with targets; returns those taken, how many were refused, and how many of these late."""
    rng = random.Random(seed)
    core, executor = make("deadline", num_blocks=4000, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=512)
    arrivals, clock = [], 1.0
    for _ in range(num_requests):
        clock += rng.expovariate(per_second)
        arrivals.append(clock)
    for i in range(6):  # a few steps to learn the pace from
        add(core, f"warm{i}", [rng.randrange(99) for _ in range(5 + 7 * i)], max_tokens=3)
        core.step()
    taken: dict[str, Seen] = {}
    num_late, reasons = 0, list[str]()
    while arrivals or core.has_unfinished():
        if not core.has_unfinished():
            executor.now = max(executor.now, arrivals[0])
        while arrivals and arrivals[0] <= executor.now:
            arrival, name = arrivals.pop(0), str(len(arrivals))
            seen = Seen(arrival, rng.choice((0.3, 0.6, 1.5)), 0.15)
            prompt = [rng.randrange(99) for _ in range(rng.randrange(10, 120))]
            targets = {"ttft_target": seen.ttft, "tpot_target": seen.tpot}
            try:
                add(core, name, prompt, rng.randrange(2, 20), arrival_time=arrival, **targets)
                taken[name] = seen
            except OverloadedError as error:
                num_late += executor.now - arrival > 0.2
                reasons.append(str(error) if error.retry_after >= 1 else "")
        for output in core.step():
            if output.new_token_ids and output.request_id in taken:
                taken[output.request_id].tokens.append(executor.now)
    assert all("target" in reason or "late" in reason for reason in reasons)
    return taken, len(reasons), num_late


@pytest.mark.parametrize("seed", range(3))
def test_feasible_targets_are_met(seed: int) -> None:
    taken, num_refused, _ = run_load(seed, per_second=2.0)
    assert num_refused <= 8, "hardly any is refused where all could be served"
    for seen in taken.values():
        assert seen.tokens[0] - seen.arrival <= seen.ttft
        gaps = [b - a for a, b in zip(seen.tokens, seen.tokens[1:], strict=False)]
        assert max(gaps, default=0.0) <= seen.tpot


@pytest.mark.parametrize("seed", range(3))
def test_infeasible_targets_are_refused_at_once(seed: int) -> None:
    taken, num_refused, num_late = run_load(seed, per_second=40.0)
    assert num_refused > 50
    assert num_late == 0, "told when it came, not after it had waited"
    met = [seen.tokens[0] - seen.arrival <= seen.ttft for seen in taken.values()]
    assert len(met) > 20, "the engine goes on serving what it can"
    assert sum(met) >= 0.95 * len(met), "and keeps what it promised"


def test_without_a_target_nobody_is_refused_and_all_end() -> None:
    core, executor = make("deadline", policy_options=PolicyOptions(tpot_target=0.02))
    for i in range(40):
        targets = {"ttft_target": 50.0} if i % 2 else {}
        try:
            add(core, str(i), [i] * 20, max_tokens=5, arrival_time=executor.now, **targets)
        except OverloadedError:
            assert i > 3, "before anything was measured"
        core.step()
    for _ in range(2000):
        if not core.has_unfinished():
            return
        core.step()
    raise AssertionError("a target that can't be met stops the engine")


# Limits and policies that change meanwhile.


@pytest.mark.parametrize("seed", range(4))
def test_limits_and_policies_change_and_nobody_is_lost(seed: int) -> None:
    """Plain requests, forks and beams, whatever is changed at any step: all end, and the books agree."""
    rng = random.Random(seed)
    core, executor = make("fcfs", 1 + seed % 2, num_blocks=rng.choice((30, 80)), max_num_seqs=6)
    executor.submit = super(Watched, executor).submit  # type: ignore[method-assign]  (limits are no longer the start's)
    ended: set[str] = set()
    for number in range(50):
        prompt = [rng.randrange(30) for _ in range(rng.randrange(1, 20))]
        width = rng.choice((1, 1, 1, 2, 3))
        beams = width > 1 and rng.random() < 0.5
        params = SamplingParams(n=width, max_tokens=6, use_beam_search=beams, temperature=0.0 if beams else 1.0)
        task = SamplingTask(params=params, max_tokens=6, stop_token_ids=frozenset(), seed=number)
        terms: dict[str, Any] = {"client": rng.choice("abc"), "priority": rng.randrange(3)}
        new = NewRequest(request_id=str(number), prompt_token_ids=prompt, task=task, arrival_time=executor.now, **terms)
        try:
            core.add(new)
        except InvalidRequestError:
            ended.add(str(number))  # more beams than may run now
        if rng.random() < 0.5:
            changes: dict[str, Any] = {
                "max_num_seqs": rng.randrange(1, 7),
                "max_num_batched_tokens": rng.randrange(1, 17),
                "policy": rng.choice(list(POLICIES)),
            }
            core.set_limits({name: value for name, value in changes.items() if rng.random() < 0.6})
        for _ in range(rng.randrange(4)):
            ended |= set(ended_in(core))
            core.check_integrity()
    for _ in range(2000):
        if not core.has_unfinished():
            break
        ended |= set(ended_in(core))
    assert ended == {str(number) for number in range(50)}
