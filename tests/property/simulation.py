"""A deterministic simulation of the scheduler: a virtual clock, and a fake executor that tells right from wrong.

The fake model computes, for each position, a fingerprint of all tokens up to it, and stores it in the slot of the
block that the plan says, as a real one stores keys and values. To sample, it reads every slot of the row back: a
wrong block table, a missed copy, a stale prefix hit or a block given to two sequences shows at once. The token drawn
depends on the fingerprint, the seed, the sequence's index and its position alone, so that each request's outputs can be
compared with those of the request run alone.

`World` is driven by the random load of `simulate` and by Hypothesis. From the command line, for long runs:
`python tests/property/simulation.py --seeds 200 --steps 20000`.
"""

import argparse
import random
import zlib
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from quire.config.cache import CacheConfig
from quire.config.scheduler import SchedulerConfig
from quire.errors import InvalidRequestError
from quire.kvcache.manager import KVManager
from quire.protocol.step import (
    NewRequest,
    NewSequence,
    PromptLogprobs,
    SequenceOutput,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from quire.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler

VOCAB = 40
STOP_TOKENS = frozenset({3, 17})
USER_STOP_TOKEN = 17
MASK = (1 << 61) - 1


def salted(cache_salt: str | None) -> int:
    """The fingerprint of no tokens at all; requests of different salts share nothing."""
    return 1 if cache_salt is None else zlib.crc32(cache_salt.encode()) + 2


def extend(fingerprint: int, token_id: int) -> int:
    """The fingerprint of one token more."""
    return (fingerprint * 6364136223846793005 + token_id * 1442695040888963407 + 11) & MASK


def draw(fingerprint: int, seed: int, sequence_index: int, position: int) -> int:
    """The token that the fake model samples."""
    return (extend(extend(fingerprint, seed), sequence_index * 1000 + position) >> 23) % VOCAB


def stop_string_found(output_token_ids: list[int]) -> bool:
    """The rule that plays the part of stop strings: two tokens in a row."""
    return len(output_token_ids) > 1 and (output_token_ids[-1] * 7 + output_token_ids[-2]) % 29 == 0


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

    def alone(self, index: int, limit: int) -> tuple[list[int], str]:
        """A sequence's whole output, and why it ends, when its request runs alone and without a fault."""
        request, found = self.request, []
        fingerprint = salted(request.cache_salt)
        for token_id in request.prompt_token_ids:
            fingerprint = extend(fingerprint, token_id)
        while True:
            token_id = draw(fingerprint, request.seed, request.first_sequence_index + index, len(found))
            found.append(token_id)
            fingerprint = extend(fingerprint, token_id)
            if token_id in request.stop_token_ids and len(found) >= request.sampling_params.min_tokens:
                return found, "stop"
            if len(found) == request.max_tokens or len(found) + len(request.prompt_token_ids) == limit:
                return found, "length"
            if self.has_stop_string and stop_string_found(found):
                return found, "string"


class Row:
    """A live sequence as the runner holds it."""

    def __init__(self, new: NewSequence, salt: int) -> None:
        self.new = new
        self.token_ids = [*new.prompt_token_ids, *new.output_token_ids]
        self.block_ids = list(new.block_ids)
        self.num_computed = new.num_computed_tokens
        self.fingerprints: list[int] = []
        for token_id in self.token_ids:
            self._extend(token_id, salt)

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self._extend(token_id, 0)

    def _extend(self, token_id: int, salt: int) -> None:
        self.fingerprints.append(extend(self.fingerprints[-1] if self.fingerprints else salt, token_id))


class FakeExecutor:
    """Carries out plans on fingerprints, and refuses whatever a real executor could stumble over."""

    def __init__(self, config: SchedulerConfig, cache: CacheConfig, expectations: dict[str, Expectation]) -> None:
        self.config = config
        self.block_size = cache.block_size
        self.rows: dict[int, Row] = {}
        self.kv = [[0] * cache.block_size for _ in range(cache.num_blocks)]
        self.expectations = expectations
        self.copies = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Rows, copies, keys and values, samples: in the order that the protocol says."""
        self._update_rows(plan)
        assert len(self.rows) <= self.config.max_num_seqs
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert len({s.sequence_id for s in plan.scheduled}) == len(plan.scheduled), "a sequence is scheduled twice"
        if not self.config.enable_chunked_prefill:
            is_new = [s.sequence_id in {new.sequence_id for new in plan.new_sequences} for s in plan.scheduled]
            rows = [self.rows[s.sequence_id] for s in plan.scheduled]
            left = [len(row.token_ids) - row.num_computed for row in rows]
            assert left == [s.num_new_tokens for s in plan.scheduled], "a prompt was cut"
            assert all(is_new) or max(left) == 1, "prefill and decode in one step"
        token_ids: list[int] = []
        logprobs: dict[int, list[TokenLogprobs]] = {}
        prompt_logprobs: dict[int, PromptLogprobs] = {}
        errors: dict[int, str] = {}
        for item in plan.scheduled:
            assert item.num_new_tokens >= 1
            row = self.rows[item.sequence_id]
            self._write(row, row.num_computed, row.num_computed + item.num_new_tokens)
        # All have written before any reads, so that one's writing over another's blocks shows in this step.
        for item in plan.scheduled:
            row = self.rows[item.sequence_id]
            start, stop = row.num_computed, row.num_computed + item.num_new_tokens
            self._read(row, stop)
            row.num_computed = stop
            params, num_prompt = row.new.sampling_params, len(row.new.prompt_token_ids)
            last = min(stop, num_prompt - 1)
            if params.prompt_logprobs is not None and last > start:
                entries = [TokenLogprobs([t], [0.0], [1]) for t in row.token_ids[start + 1 : last + 1]]
                prompt_logprobs[item.sequence_id] = PromptLogprobs(start=start + 1, entries=entries)
            if stop < len(row.token_ids):
                assert item.num_samples == 0, "a sample before the last known token is computed"
                continue
            num_outputs = len(row.token_ids) - num_prompt
            expectation = self.expectations[row.new.request_id]
            request = expectation.request
            first_tokens = row.new.sequence_index == request.first_sequence_index and not num_outputs
            assert item.num_samples == (request.num_sequences if first_tokens else 1)
            index = row.new.sequence_index - request.first_sequence_index
            if expectation.faults.get(index) == num_outputs:
                errors[item.sequence_id] = "injected"
                token_ids += [-1] * item.num_samples
                continue
            drawn = [
                draw(row.fingerprints[-1], row.new.seed, row.new.sequence_index + i, num_outputs)
                for i in range(item.num_samples)
            ]
            token_ids += drawn
            if params.logprobs is not None:
                logprobs[item.sequence_id] = [TokenLogprobs([t], [-1.0], [1]) for t in drawn]
            row.append(drawn[0])
        return StepResult(
            step_id=plan.step_id, token_ids=token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs, errors=errors
        )

    def _update_rows(self, plan: StepPlan) -> None:
        for sequence_id in plan.removed_sequence_ids:
            del self.rows[sequence_id]
        fresh: list[int] = []
        announced = set()
        for new in plan.new_sequences:
            assert new.sequence_id not in self.rows, "a sequence is announced twice"
            announced.add(new.sequence_id)
            self.rows[new.sequence_id] = Row(new, salted(self.expectations[new.request_id].request.cache_salt))
            fresh += new.block_ids[-(-new.num_computed_tokens // self.block_size) :]
        assert announced <= {s.sequence_id for s in plan.scheduled}, "announced, but not scheduled"
        for item in plan.scheduled:
            assert not (item.new_block_ids and item.sequence_id in announced)
            self.rows[item.sequence_id].block_ids += item.new_block_ids
            fresh += item.new_block_ids
        destinations = [copy.destination for copy in plan.copies]
        assert len({*fresh, *destinations}) == len(fresh) + len(destinations), "a block is handed out twice in a step"
        assert not {copy.source for copy in plan.copies} & {*fresh, *destinations}, "a source of a copy is overwritten"
        for copy in plan.copies:
            self.kv[copy.destination] = self.kv[copy.source].copy()
            self.rows[copy.sequence_id].block_ids[copy.block_index] = copy.destination
            self.copies += 1
        for block in fresh:
            self.kv[block] = [0] * self.block_size  # what a freed block held is gone, as in debug mode

    def _write(self, row: Row, start: int, stop: int) -> None:
        size = self.block_size
        for position in range(start, stop):
            self.kv[row.block_ids[position // size]][position % size] = row.fingerprints[position]

    def _read(self, row: Row, stop: int) -> None:
        kv = self.kv
        seen = [fingerprint for block in row.block_ids for fingerprint in kv[block]]
        assert seen[:stop] == row.fingerprints[:stop], (
            f"sequence {row.new.sequence_id} of {row.new.request_id} reads keys and values that are not its own"
        )


class World:
    """A scheduler, a fake executor, and what every user of them may expect."""

    def __init__(self, config: SchedulerConfig, cache: CacheConfig) -> None:
        self.config = config
        self.expectations: dict[str, Expectation] = {}
        self.scheduler = Scheduler(config, KVManager(cache))
        self.executor = FakeExecutor(config, cache, self.expectations)
        self.clock = 0.0
        self.num_requests = 0
        self.ends: Counter[str] = Counter()
        self.trace = 0
        self._last_admitted: dict[int, int] = {}

    def add(self, request: NewRequest, has_stop_string: bool = False, faults: dict[int, int] | None = None) -> bool:
        """Add a request; returns whether the scheduler took it."""
        expectation = Expectation(request, self.num_requests, has_stop_string, faults or {})
        try:
            self.scheduler.add(request)
        except InvalidRequestError:
            self.ends["refused"] += 1
            return False
        self.num_requests += 1
        self.expectations[request.request_id] = expectation
        return True

    def step(self, abort_in_flight: str | None = None) -> None:
        """Plan, execute, take in; optionally abort a request while the step is under way."""
        busy = self.scheduler.has_unfinished()
        plan = self.scheduler.schedule()
        assert bool(plan.scheduled) == busy, "a step without progress"
        self._check_order(plan)
        self._check_reasons()
        result = self.executor.execute(plan)
        if abort_in_flight is not None:
            self.abort(abort_in_flight)
        outputs = self.scheduler.update(plan, result)
        self.trace = zlib.crc32(msgspec.json.encode((plan.removed_sequence_ids, plan.scheduled, outputs)), self.trace)
        for output in outputs:
            self._take(output)
        self.clock += 0.01
        if not self.scheduler.has_unfinished():
            self.check_idle()

    def abort(self, request_id: str) -> None:
        """Abort a request, known to the scheduler or not."""
        expectation = self.expectations.get(request_id)
        outputs = self.scheduler.abort(request_id)
        missing = set(range(expectation.request.num_sequences)) - expectation.ended.keys() if expectation else set()
        assert {output.sequence_index for output in outputs} == missing
        assert all(output.finish_reason == "abort" for output in outputs)
        for output in outputs:
            self._take(output)

    def check_integrity(self) -> None:
        """Everything that is checked between steps."""
        self.scheduler.check_integrity()
        assert self.expectations.keys() == self.scheduler._groups.keys(), "a request is lost, or kept for ever"

    def check_idle(self) -> None:
        """Idle means no requests and a full pool."""
        self.check_integrity()
        assert not self.expectations
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.scheduler.kv_cache_usage == 0.0

    def drain(self, max_steps: int = 100_000) -> None:
        """Step until idle, and once more for the last rows."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished():
                break
            self.step()
        self.check_idle()
        self.step()
        assert not self.executor.rows, "rows are left over"

    def _check_order(self, plan: StepPlan) -> None:
        """Requests are first admitted in the order in which they came, within a priority."""
        for new in plan.new_sequences:
            expectation = self.expectations[new.request_id]
            request = expectation.request
            if new.sequence_index != request.first_sequence_index or new.output_token_ids:
                continue
            rank = request.priority if self.config.policy == "priority" else 0
            if expectation.outputs.setdefault(-1, []):
                continue  # preempted within its prompt, and back
            expectation.outputs[-1].append(1)
            assert self._last_admitted.get(rank, -1) < expectation.order, "a later request was served first"
            self._last_admitted[rank] = expectation.order

    def _check_reasons(self) -> None:
        reasons = self.scheduler.waiting_reasons()
        assert sum(reasons.values()) == self.scheduler.num_waiting
        assert "next_step" not in reasons, "a step was planned, and does not say why somebody waits"

    def _take(self, output: SequenceOutput) -> None:
        expectation = self.expectations[output.request_id]
        request, index = expectation.request, output.sequence_index
        assert index not in expectation.ended, "news of a sequence that has ended"
        tokens = expectation.outputs.setdefault(index, [])
        tokens += output.new_token_ids
        if output.prompt_logprobs is not None:
            assert output.prompt_logprobs.start == expectation.num_prompt_logprobs, "prompt logprobs twice, or a gap"
            expectation.num_prompt_logprobs += len(output.prompt_logprobs.entries)
        if output.new_token_ids:
            if request.sampling_params.prompt_logprobs is not None:
                assert expectation.num_prompt_logprobs == len(request.prompt_token_ids)
            if request.sampling_params.logprobs is not None:
                assert output.logprobs is not None
                assert [entry.token_ids[0] for entry in output.logprobs] == output.new_token_ids
        reason = output.finish_reason
        if reason is None and expectation.has_stop_string and stop_string_found(tokens):
            reason = "string"
            self.scheduler.finish_sequence(output.request_id, index)
        if reason is None:
            return
        self.ends[reason] += 1
        expectation.ended[index] = reason
        whole, why = expectation.alone(index, self.config.max_model_len)
        if reason in ("abort", "error"):
            assert tokens == whole[: len(tokens)], "what came before the end differs from the request run alone"
        else:
            assert (tokens, reason) == (whole, why), "the output differs from that of the request run alone"
        stopped_by_user = reason == "stop" and tokens[-1] == USER_STOP_TOKEN
        assert output.stop_reason == (USER_STOP_TOKEN if stopped_by_user else None)
        assert (output.error is not None) == (reason == "error")
        if len(expectation.ended) == request.num_sequences:
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
            sampling_params=params,
            max_tokens=max_tokens,
            stop_token_ids=STOP_TOKENS if rng.random() < 0.7 else frozenset(),
            seed=rng.randrange(1000),
            first_sequence_index=rng.choice((0, 0, 0, 7)),
            arrival_time=self.world.clock,
            priority=rng.randrange(3),
            cache_salt=rng.choice((None, None, None, "a", "b")),
        )

    def arrive(self) -> None:
        """Add one request."""
        request = self.request()
        faults = {self.rng.randrange(request.num_sequences): self.rng.randrange(6)} if self.rng.random() < 0.04 else {}
        self.world.add(request, self.rng.random() < 0.3, faults)

    def victim(self) -> str | None:
        """A request to abort: mostly one that lives, sometimes one that is unknown."""
        live = list(self.world.expectations)
        return self.rng.choice(live) if live and self.rng.random() < 0.9 else "nobody"


def make_world(rng: random.Random) -> World:
    """A world of random, narrow limits: preemption, chunking and eviction happen all the time."""
    limit = rng.choice((24, 40))
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
    cache = CacheConfig(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=rng.random() < 0.8)
    return World(config, cache)


def simulate(seed: int, num_steps: int) -> World:
    """Run one seed: bursts of arrivals and quiet times, aborts between and within steps, faults; then drain."""
    rng = random.Random(seed)
    world = make_world(rng)
    load = Load(rng, world)
    rate = 0.3
    for step in range(num_steps):
        if step % 200 == 0:
            rate = rng.choice((0.02, 0.1, 0.3, 0.6))
        if rng.random() < rate and len(world.expectations) < 30:
            load.arrive()
        if rng.random() < 0.01 and (request_id := load.victim()) is not None:
            world.abort(request_id)
        in_flight = load.victim() if rng.random() < 0.01 else None
        world.step(in_flight)
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
        scheduler = world.scheduler
        print(
            f"{dict(world.ends)} preemptions {scheduler.num_preemptions} copies {world.executor.copies} "
            f"hits {scheduler.prefix_cache_hits}/{scheduler.prefix_cache_queries} trace {world.trace:08x}",
            flush=True,
        )


if __name__ == "__main__":
    main()
