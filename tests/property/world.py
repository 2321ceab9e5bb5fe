"""An engine core without a model, and everything that a user of it may expect.

`simulated.py` stands in for the workers: its model's tokens depend on a request alone, and it refuses
whatever a real executor could stumble over. A `World` is driven by the random load of `simulation` and by Hypothesis;
it can be stepped, disturbed within a step, killed and started again. What is checked, by the numbers of the comments:

1. Free and used blocks are all blocks; a block's reference count is the number of its live owners.
2. No block is reachable from two unrelated prefix hashes, and a hash never leads to other tokens than before.
3. Every accepted request ends exactly once, with one finish reason or one error.
4. What is counted and what is delivered is the same.
5. No step without progress while work exists; what can never fit is refused at once with the numbers; all who wait can
   say why.
6. Nobody is overtaken by one who comes later in the policy's order; the first always gets on, so that nobody starves.
7. Idle means no requests and a full pool.
8. Nothing of one request is ever visible in another: tokens, blocks, random numbers. What a freed block held is lost.
9. No error text holds a path, an address or a stack trace.
10. A request that is refused, fails or is aborted changes no other's output.
11. Same seed and same arrivals, same trace.

Besides: KV events, as they are told, say which blocks can be found.
"""

import dataclasses
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest
from expectation import Expectation, make_continuation
from fake_grammars import FakeManager
from simulated import FakeModel, SimulatedExecutor

from quire.config.draft_tree import DraftTree
from quire.config.scheduler import SchedulerConfig
from quire.engine.core import EngineCore
from quire.errors import EngineDeadError, InvalidRequestError, OverloadedError
from quire.kvcache.manager import KVManager
from quire.protocol.cache import CacheLayout
from quire.protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from quire.protocol.requests import NewRequest
from quire.protocol.step import SampleGuide, SequenceOutput, StepPlan, StepResult
from quire.protocol.worker import CallReply, Invoke, WorkerCall, WorkerReply
from quire.scheduler.planner import Planner
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import Sequence, SequenceStatus

VOCAB = 40


@dataclass(frozen=True)
class Kind:
    """How the simulated executor works: plans at once, drafts at once, and how good those are."""

    max_in_flight: int = 1
    max_drafts: int = 0
    accuracy: float = 0.0
    tree: str | None = None  # as speculative_token_tree
    num_stages: int = 1  # of a pipeline, which has as many plans at once


@dataclass(frozen=True)
class Disturbance:
    """What happens while a step is under way; it may raise."""

    act: Callable[[], None]
    when: str = "submitted"  # or "computed": the workers are done, and nobody knows yet


class CheckingExecutor(SimulatedExecutor):
    """Asserts what any plan must keep to, and lets tests do something while a step is under way."""

    def __init__(self, world: "World", model: FakeModel, max_in_flight: int) -> None:
        super().__init__(model, max_in_flight, world.disk)
        self.world = world
        self.disturbance: Disturbance | None = None
        self.num_submitted = 0

    def submit(self, plan: StepPlan) -> None:
        self.num_submitted += 1
        self.world.check_plan(plan)
        super().submit(plan)
        self._disturb("submitted")

    def collect(self, guide: SampleGuide | None = None) -> StepResult:
        self.world.clock += 0.002 + 0.0005 * self._plans[0].num_tokens
        result = super().collect(guide)
        assert len(self.rows) <= self.world.config.max_num_seqs
        self._disturb("computed")
        return result

    def call(self, call: WorkerCall) -> list[WorkerReply]:
        if not isinstance(call, Invoke):
            return super().call(call)
        if call.method == "sleep":
            self.reset()
            self._kv = self._host = []
        elif call.arguments == [["kv_cache"]]:
            self.initialize_cache(self.world.layout)
        return [CallReply(None)]

    def contents(self, group: int, block: int) -> tuple[int, ...]:
        """What a block holds."""
        return tuple(self._kv[group][block])

    def _disturb(self, when: str) -> None:
        disturbance = self.disturbance
        if disturbance is not None and disturbance.when == when:
            self.disturbance = None
            disturbance.act()


def check_order(planner: Planner, admitted: Sequence) -> None:
    """Nobody who waits still comes before a sequence that was just admitted: in its lane, or in one of a lower rank."""
    lane = admitted.group.lane
    for other in planner.waiting:
        if other.group.lane == lane:
            assert admitted.own_key < other.own_key, "overtaken by a later one"
        else:  # the seat begins with the lane's rank when it was admitted
            assert admitted.key[0] <= planner.policy.rank(other.group.lane), "overtaken by a lane whose turn was later"


class World:
    """An engine core on a simulated executor, and what every user of it may expect.

    Attributes:
        ends: finish reasons and events -> how often.
        trace: a checksum over all that came out, and when.
        disk: what engines have saved, for those that come after them; None: there is no such tier.
    """

    def __init__(
        self, config: SchedulerConfig, layout: CacheLayout, caching: bool, kind: Kind, has_disk: bool = False
    ) -> None:
        self.disk: dict[tuple[int, bytes], list[int]] | None = {} if has_disk else None
        self.num_disk_hits = 0
        tree = None if kind.tree is None else DraftTree.read(kind.tree)
        facts = {"draft_tree": tree, "drafts_forced": tree is None, "num_stages": kind.num_stages}
        self.config = dataclasses.replace(config, **facts)  # type: ignore[arg-type]
        self.layout = layout
        self.caching = caching
        self.kind = kind
        self.expectations: dict[str, Expectation] = {}
        self.model = FakeModel(VOCAB, kind.max_drafts, kind.accuracy, self._fails, tree)
        self.clock = 0.0
        self.num_copies = self.num_forks = self.num_accepted = self.num_forced = self.num_out = self.num_in = 0
        self.ends: Counter[str] = Counter()
        self.trace = 0
        self._named: list[dict[bytes, tuple[int, ...]]] = [{} for _ in layout.groups]  # a hash's content, by KV group
        self._told: list[set[bytes]] = [set() for _ in layout.groups]  # what KV events say that can be found
        self._passed_over = 0  # plans in succession without the first in order
        self.scheduler = self._scheduler()
        self.executor, self.core = self._engine()

    def _scheduler(self) -> Scheduler:
        stored: list[list[bytes]] | None = None
        if self.disk is not None:
            groups = range(len(self.layout.groups))
            stored = [[name for group, name in self.disk if group == number] for number in groups]
        kv = KVManager(self.layout, self.caching, keeps_events=True, stored=stored)
        return Scheduler(self.config, kv, make_continuation, FakeManager())

    def _engine(self) -> tuple[CheckingExecutor, EngineCore]:
        executor = CheckingExecutor(self, self.model, self.kind.max_in_flight)
        executor.initialize_cache(self.layout)
        executor.clock = lambda: self.clock
        return executor, EngineCore(self.scheduler, executor)

    def go_on_elsewhere(self) -> None:
        """The scheduler goes on with a fresh worker: no result comes any more, and no block holds anything."""
        for output in self.core._undelivered:  # such as of grammars that could not be compiled
            self._take(output)
        self._count()
        self.scheduler.cancel()
        if self.scheduler.kv.disk is not None:
            self.scheduler.kv.disk.saves.clear()  # their blocks are lost, and with them the files: reads will fail
        assert self.scheduler.kv.reset_prefix_cache()
        self.executor, self.core = self._engine()
        self.ends["moved"] += 1

    def add(self, request: NewRequest, has_stop_string: bool = False, faults: dict[int, int] | None = None) -> bool:
        """Add a request; returns whether the scheduler took it."""
        try:
            self.core.add(request)
        except InvalidRequestError as error:
            text = str(error)
            # Invariant 5: refused at once, and with the numbers. Invariant 9: without a path, an address or a trace.
            assert any(character.isdigit() for character in text)
            assert not any(part in text for part in ("/", "0x", "Traceback"))
            self.ends["refused"] += 1
            return False
        except OverloadedError as error:
            is_late = "refused now rather than answered late" in str(error)
            assert self.core._asleep or is_late
            self.ends["late"] += 1
            return False
        self.expectations[request.request_id] = Expectation(request, has_stop_string, faults or {})
        return True

    def step(self, disturbance: Disturbance | None = None) -> None:
        """One step of the core; optionally something happens while it is under way.

        After an exception of the executor the engine is dead, and goes on elsewhere.
        """
        self.executor.disturbance = disturbance
        must_work = self.scheduler.has_unfinished() and not self.core._plans
        must_work = must_work and not self.scheduler.guidance.is_compiling
        num_submitted, num_events = self.executor.num_submitted, self.ends.total()
        outputs: list[SequenceOutput] = []
        try:
            outputs = self.core.step()
        except KeyboardInterrupt:
            self.ends["interrupted"] += 1
        except EngineDeadError:
            if disturbance is None or self.executor.disturbance is not None:
                raise  # nobody killed it
            self._die()
        # Invariant 5: no step without progress while work exists.
        assert not must_work or self.executor.num_submitted > num_submitted or self.ends.total() > num_events, "stalled"
        self.executor.disturbance = None
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
        assert {output.sequence_index for output in outputs} == (expectation.missing if expectation else set())
        assert all(output.finish_reason == "abort" for output in outputs)
        for output in outputs:
            self._take(output)

    def pin(self, name: str, tokens: list[int], cache_salt: str | None) -> None:
        """Pin a prefix, if it is cached and leaves room for everybody, or give up the one of this name."""
        try:
            if not self.scheduler.kv.pins.remove(name):
                self.scheduler.pin_prefix(name, tokens, cache_salt)
                self.ends["pinned"] += 1
        except InvalidRequestError:
            pass

    def hold(self) -> None:
        """All that runs is kept as it is, and nothing of it is in anybody's way; then it goes on."""
        self.core.call("hold", True)
        assert not self.core.has_unfinished()
        self.check_integrity()
        assert self.core.call("reset_prefix_cache"), "what is held holds blocks"
        self.core.call("hold", False)
        self.ends["held"] += 1

    def sleep(self, request: NewRequest) -> None:
        """The engine loses its KV cache, and whatever runs goes on after; it takes no request meanwhile."""
        is_idle = not self.core.has_unfinished() and not self.core._plans
        if self.core.call("sleep", 1, False):
            assert not self.expectations
        else:
            assert not is_idle
            assert self.core.call("sleep", 1, True)
        assert not self.add(request)
        assert not self.core.has_unfinished()
        self.core.call("wake_up", ["weights"])
        assert self.core.call("is_sleeping")
        self.core.call("wake_up")
        self.ends["slept"] += 1

    def check_events(self) -> None:
        """Who follows the KV events knows which blocks can be found, and that their names are of their tokens."""
        log, hasher = self.scheduler.kv.events, self.scheduler.kv._hash
        assert log is not None
        for event in log.take():
            if isinstance(event, AllBlocksCleared):
                for told in self._told:
                    told.clear()
                continue
            told = self._told[event.group_idx or 0]
            assert told.isdisjoint(event.block_hashes) == isinstance(event, BlockStored)
            assert len({*event.block_hashes}) == len(event.block_hashes)
            if isinstance(event, BlockRemoved):
                assert told.issuperset(event.block_hashes), "a block was removed that was not there"
                told.difference_update(event.block_hashes)
                continue
            told.update(event.block_hashes)
            size, parent = event.block_size, event.parent_block_hash
            assert len(event.token_ids) == size * len(event.block_hashes)
            for number, name in enumerate(event.block_hashes):
                if parent is not None:
                    assert hasher(parent, event.token_ids[number * size : (number + 1) * size]) == name
                parent = name
        for told, pool in zip(self._told, self.scheduler.kv.pools, strict=True):
            assert told == pool._block_of.keys(), "what events say is not what can be found"

    def check_integrity(self) -> None:
        """Everything that is checked between steps (invariants 1 and 2, and that no request is lost)."""
        self.core.check_integrity()
        self.check_events()
        assert self.expectations.keys() == self.scheduler._outcomes.groups.keys(), "a request is lost, or kept for ever"
        # Invariant 2: whatever a hash leads to, it is always the same tokens.
        for number, (group, named) in enumerate(zip(self.scheduler.kv._groups, self._named, strict=True)):
            for block_hash, block in group.pool._block_of.items():
                content = self.executor.contents(number, block)
                assert named.setdefault(block_hash, content) == content, "a hash leads to another prefix than before"

    def check_idle(self) -> None:
        """Invariant 7: idle means no requests and a full pool."""
        self.check_integrity()
        assert not self.expectations
        stats = self.scheduler.stats()
        assert stats.num_requests_running == stats.num_requests_waiting == 0
        pinned = any(self.scheduler.kv.pins.num_blocks)  # `check_integrity` has counted them
        assert (stats.kv_cache_usage_perc == 0.0) != pinned

    def check_plan(self, plan: StepPlan) -> None:
        """Every plan keeps to the limits, serves people in their order, and those who wait have a reason."""
        config, planned = self.scheduler.config, plan.scheduled  # as it is now: limits change
        scheduled, announced = {s.sequence_id for s in planned}, {new.sequence_id for new in plan.new_sequences}
        budget = config.max_num_batched_tokens
        if budget < self.config.max_num_batched_tokens:  # what runs goes on where it was lowered, with a token each
            budget = max(budget, self.config.max_num_seqs)
        assert plan.num_tokens <= budget
        assert len(scheduled) == len(planned), "a sequence is scheduled twice"
        assert announced <= scheduled, "announced, but not scheduled"
        assert not any(s.new_block_ids or s.edits for s in planned if s.sequence_id in announced)
        if not config.enable_chunked_prefill:
            is_new = [s.sequence_id in announced for s in planned]
            assert all(is_new) or max(s.num_new_tokens - s.num_drafts for s in planned) == 1, "prefill and decode"
        planner = self.scheduler._planner
        running = {sequence.sequence_id: sequence for sequence in planner.running}
        # Invariant 6: nobody is served before one that comes first and could be, and the very first always gets on.
        for sequence_id in announced:
            check_order(planner, running[sequence_id])
        first = next((s for s in planner.running if not s.sits_out), None)
        if config.enable_chunked_prefill and first is not None:
            awaits_result = first.num_in_flight > 0 and first.num_scheduled >= first.num_expected
            gets_on = first.sequence_id in scheduled or awaits_result
            self._passed_over = 0 if gets_on else self._passed_over + 1
            # Of a pipeline's stages each has a part of what runs: it may be the next one's.
            assert self._passed_over < config.num_stages, "the first in order does not get on"
        # Invariant 5: all who wait can say why.
        stats = self.scheduler.stats()
        reasons = stats.waiting_reasons
        assert sum(reasons.values()) == stats.num_requests_waiting
        assert "next_step" not in reasons, "a step was planned, and does not say why somebody waits"
        assert all(s.status is SequenceStatus.PREPARING and s.awaits for s in planner.preparing.values())

    def drain(self, max_steps: int = 100_000) -> None:
        """Step until idle, and once more for the last rows."""
        self.scheduler.kv.pins.remove_all()
        for _ in range(max_steps):
            if not self.core.has_unfinished():
                break
            self.step()
        self.check_idle()
        self.step()
        assert not self.executor.rows, "rows are left over"
        assert not self.executor.requests, "requests are left over"
        self._count()

    def _die(self) -> None:
        """The executor has failed: from every call a typed error, and then a fresh engine goes on where it was."""
        with pytest.raises(EngineDeadError):
            self.core.step()
        self.ends["died"] += 1
        self.go_on_elsewhere()

    def _count(self) -> None:
        """Add up what executors did."""
        self.num_copies += self.executor.num_copies
        self.num_out += self.executor.num_out
        self.num_in += self.executor.num_in
        tiers = self.scheduler.stats().tiers
        self.num_disk_hits = tiers.disk_hits_total if tiers is not None else 0
        self.num_forks += self.executor.num_forks
        self.num_accepted += self.executor.num_accepted
        self.num_forced += self.executor.num_forced

    def _fails(self, request_id: str, index: int, position: int) -> bool:
        expectation = self.expectations.get(request_id)
        return expectation is not None and expectation.faults.get(index) == position

    def _take(self, output: SequenceOutput) -> None:
        expectation = self.expectations[output.request_id]
        reason = output.finish_reason
        if expectation.take(output) is not None:
            reason = "string"
            self.core.finish_sequence(output.request_id, output.sequence_index)
        if reason is None:
            return
        self.ends[reason] += 1
        if expectation.task.has_grammar:
            self.ends[f"guided {reason}"] += 1
        if expectation.task.num_beams and reason in ("stop", "length"):
            self.ends["beam"] += 1
        expectation.end(output, reason, self.model)
        if not expectation.missing:  # invariant 3: it has ended once; any further news of it would be a KeyError
            del self.expectations[output.request_id]
