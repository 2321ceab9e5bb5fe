"""A deterministic simulation of the engine core: a virtual clock, and an executor that tells right from wrong.

`quire.executor.simulated` stands in for the workers: its model's tokens depend on a request alone, and it refuses
whatever a real executor could stumble over. One or two plans are in flight, drafts are right with some probability,
requests fork at their prompt's end or, as a `Grove`, in between; Ctrl-C comes at any time. Each request's outputs must
be those of the request run alone.

`World` is driven by the random load of `simulate` and by Hypothesis. From the command line, for long runs:
`python tests/property/simulation.py --seeds 200 --steps 20000`.
"""

import argparse
import random
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec
from groves import Grove, grow_alone

from quire.config.scheduler import SchedulerConfig
from quire.engine.core import EngineCore
from quire.errors import InvalidRequestError
from quire.executor.simulated import FakeModel, SimulatedExecutor, extend, root_fingerprint
from quire.kvcache.groups import window_reach
from quire.kvcache.manager import KVManager
from quire.protocol.cache import CacheGroup, CacheLayout
from quire.protocol.requests import NewRequest, SamplingTask
from quire.protocol.step import SampleGuide, SequenceOutput, StepPlan, StepResult
from quire.sampling_params import SamplingParams
from quire.scheduler.continuation import Continuation, Independent
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import SequenceStatus
from quire.scheduler.state import SchedulerState

VOCAB = 40
EOS_TOKEN, USER_STOP_TOKEN = 3, 17
STOP_TOKENS = frozenset({EOS_TOKEN, USER_STOP_TOKEN})


def stop_string_found(output_token_ids: list[int]) -> bool:
    """The rule that plays the part of stop strings: two tokens in a row."""
    return len(output_token_ids) > 1 and (output_token_ids[-1] * 7 + output_token_ids[-2]) % 29 == 0


@dataclass(frozen=True)
class Kind:
    """How the simulated executor works: plans at once, drafts at once, and how good those are."""

    max_in_flight: int = 1
    max_drafts: int = 0
    accuracy: float = 0.0


Windows = tuple[int | None, ...]  # of each KV group; None: full attention


@dataclass
class Expectation:
    """A request as its user sees it: what it must bring, what it has brought."""

    request: NewRequest
    order: int
    has_stop_string: bool = False
    faults: dict[int, int] = field(default_factory=dict)  # sequence index -> fails in place of this output token
    outputs: dict[int, list[int]] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    num_prompt_logprobs: int = 1
    grown: dict[int, tuple[list[int], str]] = field(default_factory=dict)

    @property
    def task(self) -> SamplingTask:
        assert isinstance(self.request.task, SamplingTask)
        return self.request.task

    def alone(self, model: FakeModel, index: int) -> tuple[list[int], str]:
        """A sequence's whole output, and why it ends, when its request runs alone and without a fault."""
        if is_grove(self.task):
            if not self.grown:
                self.grown = grow_alone(self.request, model)
            found, why = self.grown[index]
        else:
            found, why = self._drawn_alone(model, index)
        for length in range(1, len(found)):
            if self.has_stop_string and stop_string_found(found[:length]):
                return found[:length], "string"
        return found, why

    def _drawn_alone(self, model: FakeModel, index: int) -> tuple[list[int], str]:
        task, found = self.task, []
        fingerprint = root_fingerprint(self.request.cache_salt)
        for token_id in self.request.prompt_token_ids:
            fingerprint = extend(fingerprint, token_id)
        while True:
            token_id = model.draw(fingerprint, task.seed, task.first_sequence_index + index, len(found))
            found.append(token_id)
            fingerprint = extend(fingerprint, token_id)
            if token_id in task.stop_token_ids and len(found) >= task.params.min_tokens:
                return found, "stop"
            if len(found) == task.max_tokens:
                return found, "length"


def is_grove(task: SamplingTask) -> bool:
    """Whether a request's sequences grow out of each other; most of those with several do not."""
    return task.num_sequences > 1 and task.seed % 3 == 0


def make_continuation(task: SamplingTask) -> Continuation:
    """What a request's results mean."""
    return Grove(task) if is_grove(task) else Independent(task)


class CheckingExecutor(SimulatedExecutor):
    """Asserts what any plan must keep to, and lets tests do something while a step is under way."""

    def __init__(self, world: "World", model: FakeModel, max_in_flight: int) -> None:
        super().__init__(model, max_in_flight)
        self.world = world
        self.during_step: Callable[[], None] | None = None

    def submit(self, plan: StepPlan) -> None:
        config, planned = self.world.config, plan.scheduled
        assert plan.num_tokens <= config.max_num_batched_tokens
        assert len({s.sequence_id for s in planned}) == len(planned), "a sequence is scheduled twice"
        announced = {new.sequence_id for new in plan.new_sequences}
        assert announced <= {s.sequence_id for s in planned}, "announced, but not scheduled"
        assert not any(s.new_block_ids or s.edits for s in planned if s.sequence_id in announced)
        if not config.enable_chunked_prefill:
            is_new = [s.sequence_id in announced for s in planned]
            assert all(is_new) or max(s.num_new_tokens - s.num_drafts for s in planned) == 1, "prefill and decode"
        self.world.check_plan(plan)
        super().submit(plan)
        hook, self.during_step = self.during_step, None
        if hook is not None:
            hook()

    def collect(self, guide: SampleGuide | None = None) -> StepResult:
        config = self.world.config
        result = super().collect(guide)
        assert len(self.rows) <= config.max_num_seqs
        return result


class World:
    """An engine core on a simulated executor, and what every user of it may expect."""

    def __init__(self, config: SchedulerConfig, layout: CacheLayout, caching: bool, kind: Kind) -> None:
        self.config = config
        self.layout = layout
        self.caching = caching
        self.kind = kind
        self.expectations: dict[str, Expectation] = {}
        self.model = FakeModel(VOCAB, kind.max_drafts, kind.accuracy, self._fails)
        self.clock = 0.0
        self.num_requests = 0
        self.num_copies = self.num_forks = self.num_accepted = 0
        self.ends: Counter[str] = Counter()
        self.trace = 0
        self.scheduler, self.executor, self.core = self._engine()

    def _engine(self) -> tuple[Scheduler, CheckingExecutor, EngineCore]:
        scheduler = Scheduler(self.config, KVManager(self.layout, self.caching), make_continuation)
        executor = CheckingExecutor(self, self.model, self.kind.max_in_flight)
        executor.initialize_cache(self.layout)
        return scheduler, executor, EngineCore(scheduler, executor, clock=lambda: self.clock)

    def go_on_elsewhere(self) -> None:
        """Take the scheduler's state to an engine with a fresh worker and an empty cache."""
        saved = msgspec.msgpack.encode(self.scheduler.state())
        self._count()
        self.scheduler, self.executor, self.core = self._engine()
        self.scheduler.restore(msgspec.msgpack.decode(saved, type=SchedulerState), self.clock)
        self.ends["restored"] += 1

    def add(self, request: NewRequest, has_stop_string: bool = False, faults: dict[int, int] | None = None) -> bool:
        """Add a request; returns whether the scheduler took it."""
        expectation = Expectation(request, self.num_requests, has_stop_string, faults or {})
        try:
            self.core.add(request)
        except InvalidRequestError:
            self.ends["refused"] += 1
            return False
        self.num_requests += 1
        self.expectations[request.request_id] = expectation
        return True

    def step(self, during: Callable[[], None] | None = None) -> None:
        """One step of the core; optionally something is done while it is under way, which may raise an interrupt."""
        self.executor.during_step = during
        try:
            outputs = self.core.step()
        except KeyboardInterrupt:
            outputs = []
            self.ends["interrupted"] += 1
        self.executor.during_step = None
        self.trace = zlib.crc32(msgspec.json.encode(outputs), self.trace)
        for output in outputs:
            self._take(output)
        self.clock += 0.01
        if not self.core.has_unfinished():
            self.check_idle()

    def abort(self, request_id: str) -> None:
        """Abort a request, known to the scheduler or not."""
        expectation = self.expectations.get(request_id)
        outputs = self.core.abort(request_id)
        missing = set(range(expectation.task.num_sequences)) - expectation.ended.keys() if expectation else set()
        assert {output.sequence_index for output in outputs} == missing
        assert all(output.finish_reason == "abort" for output in outputs)
        for output in outputs:
            self._take(output)

    def check_integrity(self) -> None:
        """Everything that is checked between steps."""
        self.core.check_integrity()
        assert self.expectations.keys() == self.scheduler._outcomes.groups.keys(), "a request is lost, or kept for ever"

    def check_idle(self) -> None:
        """Idle means no requests and a full pool."""
        self.check_integrity()
        assert not self.expectations
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.scheduler.stats().kv_cache_usage_perc == 0.0

    def check_plan(self, plan: StepPlan) -> None:
        """Nobody is served before one that comes first in order and could be; all who wait have a reason."""
        planner, live = self.scheduler._planner, self.scheduler._outcomes.live
        for new in plan.new_sequences:
            key = live[new.sequence_id].key
            assert all(key < waiting.key for waiting in planner.waiting), "a later request was served first"
        reasons = planner.waiting_reasons()
        assert sum(reasons.values()) == self.scheduler.num_waiting
        assert "next_step" not in reasons, "a step was planned, and does not say why somebody waits"
        assert all(s.status is SequenceStatus.PREPARING and s.awaits for s in planner.preparing.values())

    def drain(self, max_steps: int = 100_000) -> None:
        """Step until idle, and once more for the last rows."""
        for _ in range(max_steps):
            if not self.core.has_unfinished():
                break
            self.step()
        self.check_idle()
        self.step()
        assert not self.executor.rows, "rows are left over"
        assert not self.executor.requests, "requests are left over"
        self._count()

    def _count(self) -> None:
        """Add up what executors did."""
        self.num_copies += self.executor.num_copies
        self.num_forks += self.executor.num_forks
        self.num_accepted += self.executor.num_accepted

    def _fails(self, request_id: str, index: int, position: int) -> bool:
        expectation = self.expectations.get(request_id)
        return expectation is not None and expectation.faults.get(index) == position

    def _take(self, output: SequenceOutput) -> None:
        expectation = self.expectations[output.request_id]
        request, task, index = expectation.request, expectation.task, output.sequence_index
        assert index not in expectation.ended, "news of a sequence that has ended"
        tokens = expectation.outputs.setdefault(index, [])
        if output.prompt_logprobs is not None:
            assert output.prompt_logprobs.start == expectation.num_prompt_logprobs, "prompt logprobs twice, or a gap"
            expectation.num_prompt_logprobs += len(output.prompt_logprobs.entries)
        if output.new_token_ids:
            if task.params.prompt_logprobs is not None:
                assert expectation.num_prompt_logprobs == len(request.prompt_token_ids)
            if task.params.logprobs is not None and not is_grove(task):
                assert output.logprobs is not None
                assert [entry.token_ids[0] for entry in output.logprobs] == output.new_token_ids
        reason = output.finish_reason
        for place, token_id in enumerate(output.new_token_ids):
            tokens.append(token_id)
            is_last = place == len(output.new_token_ids) - 1
            if expectation.has_stop_string and stop_string_found(tokens) and not (is_last and reason):
                reason = "string"
                self.core.finish_sequence(output.request_id, index)
                break
        if reason is None:
            return
        self.ends[reason] += 1
        expectation.ended[index] = reason
        whole, why = expectation.alone(self.model, index)
        if reason in ("abort", "error"):
            assert tokens == whole[: len(tokens)], "what came before the end differs from the request run alone"
        else:
            assert (tokens, reason) == (whole, why), "the output differs from that of the request run alone"
        needs_reason = reason == "stop" and tokens[-1] != EOS_TOKEN
        assert output.stop_reason == (tokens[-1] if needs_reason else None) or reason == "string"
        assert (output.failure is not None) == (reason == "error")
        if len(expectation.ended) == task.num_sequences:
            del self.expectations[output.request_id]


class Load:
    """Random requests, the same for the same seed."""

    def __init__(self, rng: random.Random, world: World) -> None:
        self.rng = rng
        self.world = world
        self.num_made = 0
        limit = world.config.max_model_len
        self.prefixes = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, limit))] for _ in range(4)]

    def request(self) -> NewRequest:
        """A request; about one in twenty is refused."""
        rng, limit = self.rng, self.world.config.max_model_len
        prefix = rng.choice(self.prefixes)
        prompt = prefix[: rng.randrange(len(prefix) + 1)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 6))]
        max_tokens = rng.randrange(1, max(2, limit - len(prompt)))
        n = rng.choice((1, 1, 1, 2, 3, 7))
        params = SamplingParams(
            n=n,
            max_tokens=max_tokens,
            min_tokens=rng.randrange(max_tokens) if rng.random() < 0.2 else 0,
            stop_token_ids=[USER_STOP_TOKEN],
            logprobs=rng.choice((None, None, 0)),
            prompt_logprobs=0 if rng.random() < 0.1 else None,
        )
        self.num_made += 1
        return NewRequest(
            request_id=str(self.num_made if rng.random() < 0.99 else self.num_made - 1),  # an id in use, perhaps
            prompt_token_ids=prompt,
            task=SamplingTask(
                params=params,
                max_tokens=max_tokens,
                stop_token_ids=STOP_TOKENS if rng.random() < 0.7 else frozenset(),
                eos_token_id=EOS_TOKEN,
                seed=rng.randrange(1000),
                first_sequence_index=rng.choice((0, 0, 0, 7)),
            ),
            arrival_time=self.world.clock,
            priority=rng.randrange(3),
            cache_salt=rng.choice((None, None, None, "a", "b")),
        )

    def arrive(self) -> None:
        """Add one request."""
        request = self.request()
        faults = {}
        if self.rng.random() < 0.04 and isinstance(request.task, SamplingTask):
            faults = {self.rng.randrange(request.task.num_sequences): self.rng.randrange(6)}
        self.world.add(request, self.rng.random() < 0.3, faults)

    def victim(self) -> str:
        """A request to abort: mostly one that lives, sometimes one that is unknown."""
        live = list(self.world.expectations)
        return self.rng.choice(live) if live and self.rng.random() < 0.9 else "nobody"


def make_world(rng: random.Random, kind: Kind | None = None, windows: Windows = (None,)) -> World:
    """A world of random, narrow limits: preemption, chunking and eviction happen all the time.

    `windows` has one entry for each KV group. Windows free blocks by tiles of 64 tokens, so that contexts are longer.
    """
    limit = rng.choice((24, 40)) if windows == (None,) else rng.choice((150, 200))
    block_size = rng.choice((1, 2, 4, 4, 8, 16))
    chunked = rng.random() < 0.75
    config = SchedulerConfig(
        max_model_len=limit,
        max_num_batched_tokens=rng.choice((5, 12, 32, 100)) if chunked else limit + rng.randrange(40),
        max_num_seqs=rng.choice((1, 3, 6, 8, 12, 12)),
        policy=rng.choice(("fcfs", "priority")),
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=rng.choice((0, 0, 2, 7)) if chunked else 0,
    )
    # From less than the longest request needs, so that some are refused, to room for about five.
    num_blocks = max(1, limit * rng.choice((9, 12, 20, 30, 50)) // 10 // block_size)
    caching = rng.random() < 0.8
    if kind is None:
        kind = Kind(rng.choice((1, 2)), *rng.choice(((0, 0.0), (3, 0.0), (4, 0.5), (5, 0.9))))
    counts: list[int] = []
    for window in windows:
        counts.append(num_blocks)
        if window is not None:  # what one sequence needs, and a little more, up to a whole context
            num_tokens = window_reach(window, block_size) + config.max_num_batched_tokens * kind.max_in_flight
            most = max(num_blocks, -(-limit // block_size))
            counts[-1] = min(-(-num_tokens // block_size) + rng.randrange(1 + 60 // block_size), most)
    layout = CacheLayout(
        block_size=block_size,
        groups=[CacheGroup([number], window) for number, window in enumerate(windows)],
        num_blocks=counts,
        max_model_len=limit,
    )
    return World(config, layout, caching, kind)


def interrupt() -> None:
    """Ctrl-C."""
    raise KeyboardInterrupt


def simulate(seed: int, num_steps: int, kind: Kind | None = None, windows: Windows = (None,)) -> World:
    """Run one seed: bursts of arrivals and quiet times, aborts between and within steps, faults, Ctrl-C; then drain."""
    rng = random.Random(seed)
    world = make_world(rng, kind, windows)
    load = Load(rng, world)
    rate = 0.3
    for step in range(num_steps):
        if step % 200 == 0:
            rate = rng.choice((0.02, 0.1, 0.3, 0.6))
        if rng.random() < rate and len(world.expectations) < 30:
            load.arrive()
        if rng.random() < 0.01:
            world.abort(load.victim())
        during = None
        chance = rng.random()
        if chance < 0.01:
            during = partial(world.abort, load.victim())
        elif chance < 0.013:
            during = interrupt
        elif chance < 0.015:
            world.go_on_elsewhere()
        world.step(during)
        if step % 64 == 0:
            world.check_integrity()
        if step % 500 == 0 and world.scheduler.reset_prefix_cache():
            world.ends["reset"] += 1
    world.drain()
    return world


def main() -> None:
    """Run many seeds; a failing one raises after its number was printed."""
    parser = argparse.ArgumentParser(description="Simulate the scheduler under random load.")
    parser.add_argument("--seeds", type=int, default=20, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--steps", type=int, default=20_000, help="steps per seed")
    args = parser.parse_args()
    for seed in range(args.first, args.first + args.seeds):
        print(f"seed {seed}", end=" ", flush=True)
        world = simulate(seed, args.steps)
        stats = world.scheduler.stats()
        print(
            f"{world.kind} {dict(world.ends)} preemptions {stats.num_preemptions_total} copies {world.num_copies} "
            f"forks {world.num_forks} accepted {world.num_accepted} "
            f"hits {stats.prefix_cache_hits_total}/{stats.prefix_cache_queries_total} trace {world.trace:08x}",
            flush=True,
        )


if __name__ == "__main__":
    main()
