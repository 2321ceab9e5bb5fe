"""The scheduler: takes requests, plans steps, and says what a step's result means.

The engine core calls `schedule`, and `update` with the results of plans in their order; requests may be added and
aborted at any time. There is no prefill and no decode here: each sequence has computed so many of its tokens, and each
step spends a budget of tokens on catching up. It sees token ids and block ids, never text, tensors or clocks.
"""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain, islice
from typing import Any

from msgspec import structs

from quire.config.scheduler import SchedulerConfig
from quire.errors import InvalidRequestError
from quire.kvcache.manager import KVManager
from quire.protocol.cache import PinnedPrefix
from quire.protocol.requests import NewRequest, SamplingTask
from quire.protocol.stats import BlockGroup, EngineSnapshot, EngineStats, Limits, SequenceSnapshot
from quire.protocol.step import Failure, SampleGuide, SequenceOutput, StepPlan, StepResult
from quire.scheduler.beams import continuation_of
from quire.scheduler.continuation import Continuation
from quire.scheduler.guidance import Guidance
from quire.scheduler.limits import check_is_new, check_request_fits, check_width
from quire.scheduler.live_limits import changed, limits_of
from quire.scheduler.outcomes import Outcomes
from quire.scheduler.planner import Planner
from quire.scheduler.policies.base import Load, Prompt
from quire.scheduler.reasons import waiting_reasons, why
from quire.scheduler.sequence import Sequence, SequenceStatus
from quire.structured.manager import GrammarManager

MAX_SEQUENCES = 200  # in a snapshot, beside those of watched requests


class Scheduler:
    """Continuous batching over paged KV.

    A step first gives one token to every running sequence that has caught up, then the rest of its budget to running
    sequences that have not, in the policy's order; then waiting ones are admitted, strictly in order, but for those
    that are not ready. When blocks run out, the running sequence that is last in order is preempted: it loses its
    blocks and waits, at its old place, to be computed anew. The first one always advances, so that everything ends.

    Several plans may be in flight: their results come in the order of the plans.

    Attributes:
        kv: the KV manager.
        config: limits and policy as they are now.
        guidance: what is to do with requests' grammars.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_manager: KVManager,
        make_continuation: Callable[[SamplingTask], Continuation] = continuation_of,
        grammars: GrammarManager | None = None,
    ) -> None:
        """`grammars`: compiles those of requests, where requests may have any."""
        self.config = self._most = config
        self.kv = kv_manager
        self._make_continuation = make_continuation
        self._planner = Planner(config, kv_manager)
        self._outcomes = Outcomes(self._planner, kv_manager, config)
        self.guidance = Guidance(grammars, self._planner, self._outcomes)
        self._step_id = 0
        # Step ids, when they were planned, and for which sequences.
        self._in_flight: deque[tuple[int, float, list[Sequence]]] = deque()

    # Requests come and go.

    def add(self, request: NewRequest, now: float) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: its id is in use, or it could never run in this engine.
            OverloadedError: the policy says that it had better not come now.
        """
        check_is_new(request.request_id, self._outcomes.groups)
        task = check_request_fits(request, self.config, self.kv)
        check_width(task, self.config)
        self._planner.policy.check(request, now, self._load)
        group = self._outcomes.open(request, self._make_continuation(task))
        root = self._outcomes.make_sequence(group, 0, [])
        if request.adapter is None:
            self.guidance.open(group)
        else:
            self._planner.set_aside(root, "adapter")

    def is_live(self, request_id: str) -> bool:
        """Whether a request has come and not ended."""
        return request_id in self._outcomes.groups

    def go_on(self, request_id: str) -> None:
        """A request's adapter is in its place, and stays there."""
        group = self._outcomes.groups[request_id]
        for sequence in [sequence for sequence in group.sequences.values() if sequence.awaits == "adapter"]:
            self._planner.make_ready(sequence)
        self.guidance.open(group)

    def await_adapters(self) -> list[NewRequest]:
        """All adapters have left their places; returns the requests that wait for theirs, in the order they came."""
        groups = [group for group in self._outcomes.groups.values() if group.request.adapter is not None]
        for sequence in [sequence for group in groups for sequence in group.sequences.values()]:
            if sequence.awaits == "grammar":
                self._planner.make_ready(sequence)  # it is asked for again
            if sequence.status is SequenceStatus.WAITING:
                self._planner.set_aside(sequence, "adapter")
        return [group.request for group in groups]

    def fail(self, request_id: str, failure: Failure) -> list[SequenceOutput]:
        """End a request that can't be served; returns its outputs."""
        return self._outcomes.end_request(self._outcomes.groups[request_id], "error", failure)

    def _load(self) -> Load:
        """What a request finds that is just coming. O(all that wait)."""
        planner, running = self._planner, self._planner.running
        prompts: list[Prompt] = []
        for sequence in [*running, *planner.preparing.values(), *planner.waiting]:
            if not sequence.output_token_ids:
                request, num_left = sequence.group.request, sequence.num_tokens - sequence.num_computed_tokens
                prompts.append(Prompt(request, num_left, sequence.status is SequenceStatus.RUNNING))
        tokens_left = sorted(sequence.limit - sequence.num_tokens for sequence in running)
        return Load(planner.max_running, self.config.max_num_batched_tokens, tokens_left, prompts)

    def abort(self, request_id: str) -> list[SequenceOutput]:
        """End a request now; returns one output for each sequence that had not ended. An unknown id is ignored."""
        group = self._outcomes.groups.get(request_id)
        return [] if group is None else self._outcomes.end_request(group, "abort")

    def finish_sequence(self, request_id: str, sequence_index: int) -> None:
        """End one sequence silently: the caller knows why. Does nothing if it has ended already."""
        if (group := self._outcomes.groups.get(request_id)) is not None and sequence_index in group.unfinished:
            group.unfinished.remove(sequence_index)
            self._outcomes.drop_unneeded(group)

    @property
    def num_requests(self) -> int:
        """Those that have come and not ended."""
        return len(self._outcomes.groups)

    def has_unfinished(self) -> bool:
        """Whether any request is unfinished: then `schedule` returns work, unless all of it awaits results or grammars.

        Or computed blocks are still to be written to the disk.
        """
        return bool(self._outcomes.groups or (self.kv.disk and self.kv.disk.saves))

    @property
    def limits(self) -> Limits:
        """What the next step keeps to."""
        return limits_of(self.config, self._most)

    def set_limits(self, changes: dict[str, Any]) -> Limits:
        """Keep to other limits, or to another policy, from the next plan on: see `live_limits.changed`.

        What runs beyond a lower limit goes on until it ends; another policy orders all that wait and run anew.
        """
        self.config = changed(self.config, self._most, changes)
        self._planner.set_limits(self.config, self._outcomes.groups.values())
        return self.limits

    def pin_prefix(self, name: str, token_ids: list[int], cache_salt: str | None = None) -> PinnedPrefix:
        """Keep the full blocks of a prompt that has been computed, until `kv.pins.remove` or a reset.

        Raises:
            InvalidRequestError: as `Pins.add`; or a request that was taken could never end beside it. Nothing is pinned
                then.
        """
        prefix = self.kv.pins.add(name, token_ids, cache_salt)
        try:
            for group in self._outcomes.groups.values():
                check_request_fits(group.request, self.config, self.kv)
        except InvalidRequestError as error:
            self.kv.pins.remove(name)
            raise InvalidRequestError(f"with this prefix pinned, {error}", "prompt") from None
        return prefix

    # A step.

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step; None when there is nothing to compute before a result comes, or at all.

        Without plans in flight, a plan may be there only to let workers forget what has ended.
        """
        if (plan := self._planner.plan(self._step_id, may_be_empty=not self._in_flight)) is not None:
            self._in_flight.append((self._step_id, now, self._planner.planned))
            self._step_id += 1
        return plan

    def guide(self, plan: StepPlan) -> SampleGuide | None:
        """Which tokens the oldest plan in flight may draw, once all results before its own were taken in."""
        return self.guidance.guide(plan, self._in_flight[0][2])

    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[SequenceOutput]:
        """Take in what the oldest plan in flight brought: append tokens, end, free and fork sequences.

        Results of sequences that ended while the step was under way are dropped.
        """
        assert self._in_flight, "update() without a plan in flight"
        step_id, planned_at, sequences = self._in_flight[0]
        assert plan.step_id == result.step_id == step_id, "update() with another step's plan or result"
        self._in_flight.popleft()
        # With several in flight, it began when the one before it was done.
        seconds = now - max(planned_at, self.kv.times.now)
        if plan.scheduled:
            self._planner.policy.on_step(plan.num_tokens, seconds)
        if self.kv.space is not None:
            self.kv.space.learn(plan.num_tokens, len(plan.scheduled), seconds)
        self.kv.times.now = now
        self.kv.plan_done(result.disk)
        return self._outcomes.take(sequences, plan.scheduled, result.results)

    def cancel(self) -> None:
        """Forget all plans in flight, whose results will not come, and all that workers know.

        No request ends: what ran waits at its place, and is announced and computed anew, but for what the prefix cache
        holds.
        """
        self._in_flight.clear()
        self._planner.start_anew()

    # What may be asked.

    def stats(self) -> EngineStats:
        """The figures of this moment."""
        planner = self._planner
        return EngineStats(
            num_requests_running=len(planner.running),
            num_requests_waiting=len(planner.waiting) + len(planner.preparing),
            kv_cache_usage_perc=self.kv.usage,
            **structs.asdict(planner.counts),
            waiting_reasons=waiting_reasons(planner),
            prefix_cache_evictions_total=sum(pool.num_evicted for pool in self.kv.pools),
            kv_blocks_shared=sum(pool.num_shared for pool in self.kv.pools),
            kv_blocks_pinned=sum(self.kv.pins.num_blocks),
            kv_block_residency=self.kv.times.counts(),
            tiers=self.kv.space and self.kv.space.stats(),
            speculation=self._outcomes.drafts.stats() if self.config.max_num_drafts else None,
            limits=self.limits,
        )

    def snapshot(self, stats: EngineStats, now: float, watched: Iterable[str] = ()) -> EngineSnapshot:
        """The state as a person looks at it: the first sequences, all of the `watched` requests, and the blocks.

        The running come first, then the waiting in the policy's order. Ages count from arrival times, of the same clock
        as `now`. `stats` are the engine's of this moment.
        """
        planner, groups = self._planner, self._outcomes.groups
        first = islice(chain(planner.running, planner.waiting, planner.preparing.values()), MAX_SEQUENCES)
        own = chain.from_iterable(groups[id].sequences.values() for id in watched if id in groups)
        shown = dict.fromkeys(chain(first, (s for s in own if s.status is not SequenceStatus.FINISHED)))
        return EngineSnapshot(
            stats=stats,
            sequences=[self._look_at(sequence, now) for sequence in shown],
            num_sequences=stats.num_requests_running + stats.num_requests_waiting,
            blocks=b"".join(pool.states() for pool in self.kv.pools),
            block_size=self.kv.block_size,
            block_groups=list(map(BlockGroup, self.kv.num_blocks, self.kv.windows)),
        )

    def _look_at(self, sequence: Sequence, now: float) -> SequenceSnapshot:
        runs = sequence.status is SequenceStatus.RUNNING
        return SequenceSnapshot(
            request_id=sequence.group.request_id,
            index=sequence.index,
            status="running" if runs else "waiting",
            num_prompt_tokens=len(sequence.group.request.prompt_token_ids),
            num_output_tokens=len(sequence.output_token_ids),
            num_computed_tokens=sequence.num_computed_tokens,
            num_cached_tokens=sequence.group.num_cached_tokens or 0,
            num_blocks=sum(map(len, sequence.table.block_ids)) - sum(sequence.table.first_block),
            why=None if runs else why(self._planner, self.kv, sequence),
            seconds=now - sequence.group.request.arrival_time,
        )

    def held_rows(self) -> list[int] | None:
        """The sequences whose rows workers hold, ascending; None while plans are in flight."""
        return None if self._in_flight else self._planner.held_rows()

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues, groups, tables and the pool agree. O(everything)."""
        self.kv.check_integrity()
        planner, groups, kv = self._planner, self._outcomes.groups.values(), self.kv
        most_running = min(self._most.max_num_seqs, self._most.max_num_batched_tokens)
        running, waiting, preparing = planner.running, [*planner.waiting], [*planner.preparing.values()]
        assert len(running) <= most_running, "more sequences run than may"
        assert len(waiting) == len(planner.waiting), "the waiting are counted wrong"
        for keys in ([s.key for s in running], list(map(planner.waiting.order_of, waiting))):
            assert all(a < b for a, b in zip(keys, keys[1:], strict=False)), "a queue is out of order"
        queues = {SequenceStatus.RUNNING: running, SequenceStatus.WAITING: waiting, SequenceStatus.PREPARING: preparing}
        for status, queue in queues.items():
            assert all(s.status is status for s in queue), "a sequence is in the wrong queue"
        queued = {s.sequence_id: s for s in [*running, *waiting, *preparing]}
        live = {s.sequence_id: s for group in groups for s in group.sequences.values()}
        assert queued == live, "a live sequence is in no queue, or a dead one in one"
        for sequence in queued.values():
            sequence.check_integrity(kv.block_size, len(self._in_flight))
        swapped = {s.sequence_id for s in [*waiting, *preparing] if s.table.swapped is not None}
        expected = kv.space.swapped.keys() if kv.space is not None else set()
        assert swapped == expected, "the host holds blocks for somebody who does not wait"
        for group in groups:
            assert group.unfinished, f"request {group.request_id} has ended and is still known"
            assert all(group.needs(index) for index in group.sequences), "a sequence goes on that nobody needs"
        held = [count - free for count, free in zip(kv.num_blocks, kv.num_free_blocks, strict=True)]
        assert running or held == kv.pins.num_blocks, "idle, but blocks are held"
