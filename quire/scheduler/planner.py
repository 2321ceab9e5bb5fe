"""The planner: which tokens of which sequences the next step computes, and who has to make room for whom.

The scheduler's half that looks ahead: it keeps the queues and asks the KV manager for blocks. It knows nothing of
results, and of requests only what their policy makes of them.
"""

from collections.abc import Collection
from typing import Any

import msgspec

from quire.config.scheduler import SchedulerConfig
from quire.kvcache.manager import KVManager
from quire.kvcache.table import NOTHING_APPENDED, PrefixMatch
from quire.protocol.step import Fork, StepPlan
from quire.scheduler.plan_builder import PlanBuilder
from quire.scheduler.policies.base import Policy
from quire.scheduler.policies.registry import POLICIES
from quire.scheduler.sequence import Sequence, SequenceGroup, SequenceStatus
from quire.scheduler.waiting import WaitingQueue, insert, remove


class PlanCounts(msgspec.Struct):
    """What the planner has counted since the start; each field is one of `EngineStats`."""

    num_preemptions_total: int = 0  # sequences whose blocks were taken from them
    num_forks_total: int = 0  # sequences that began with the blocks of another
    prefix_cache_queries_total: int = 0  # prompt tokens looked up, at requests' first admission
    prefix_cache_hits_total: int = 0  # and found


class Planner:
    """The running, the waiting and the preparing sequences, and the rules by which they change places.

    Attributes:
        policy: orders the queues.
        watches_service: whether the policy wants to be told what was served.
        running: sequences that hold blocks, in the order of their keys.
        waiting: sequences that hold none and could run if there were room.
        planned: sequences of the last plan, in its order.
        preparing: sequences that could not, by id; they never hold up those that wait.
        ended: requests for workers to forget with the next plan.
        max_running: most sequences that run at once; more may run still, where it was lowered.
        counts: what became of sequences since the start.
        reason: why the first waiting sequence was not admitted; None where no step was planned since it came.
    """

    def __init__(self, config: SchedulerConfig, kv: KVManager) -> None:
        self.running: list[Sequence] = []
        self.planned: list[Sequence] = []
        self.preparing: dict[int, Sequence] = {}
        self.counts = PlanCounts()
        self._config, self._kv = config, kv
        self._removed: list[int] = []  # rows for the worker to drop with the next plan
        self.ended: dict[str, None] = {}
        self._forks: dict[int, Fork] = {}  # rows for it to copy, by the new sequence
        self._prefixes: dict[bytes, list[Sequence]] = {}  # who awaits a block that another one computes, by its name
        self.num_preparing: dict[str, int] = {}  # by what they await
        self.reason: str | None = None
        self.policy = Policy(config.policy_options)
        self._use_policy(config)
        self.set_limits(config, [])

    def plan(self, step_id: int, may_be_empty: bool) -> StepPlan | None:
        """The next step, or None when there is nothing to be done now.

        Schedules something whenever any sequence is neither preparing nor ahead of a result; otherwise there is a plan
        only if `may_be_empty` and workers have something to forget.
        """
        builder = PlanBuilder(self.budget(), foresees=self._config.num_stages == 1)
        self.reason = None
        if self._kv.settled:
            self._wake_readers()
        if self._config.enable_chunked_prefill:
            self._continue_running(builder)
            self._admit_waiting(builder)
        else:
            self._admit_waiting(builder)
            if not builder.scheduled:
                self._continue_running(builder)
        if not builder.scheduled and may_be_empty and len(self.waiting):
            self._unseat(builder)
        if not builder.scheduled:  # moves to the host wait for the next plan
            disk = self._kv.disk
            has_news = self._removed or self.ended or self._forks or (disk and (disk.saves or disk.under_way))
            if not (may_be_empty and has_news):
                return None
        moves = self._kv.end_plan()
        assert builder.scheduled or not (moves.copies or moves.in_), "blocks are copied for nobody"
        for request in builder.new_requests:  # an id that is used again: the new request takes the old one's place
            self.ended.pop(request.request_id, None)
        self.planned = builder.sequences
        plan = StepPlan(
            step_id=step_id,
            removed_sequence_ids=self._removed,
            ended_request_ids=list(self.ended),
            new_requests=builder.new_requests,
            new_sequences=builder.new_sequences,
            forks=list(self._forks.values()),
            moves=moves,
            scheduled=builder.scheduled,
        )
        self._removed, self.ended, self._forks = [], {}, {}
        return plan

    # What may be changed between steps.

    def set_limits(self, config: SchedulerConfig, groups: Collection[SequenceGroup]) -> None:
        """Keep to other limits from the next plan on; what runs goes on.

        `groups`: all live requests, in their order of add, whom another policy may order anew.
        """
        last, self._config = self._config, config
        self.max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.reason = None
        if (config.policy, config.policy_options) != (last.policy, last.policy_options):
            self._change_policy(groups)

    def _change_policy(self, groups: Collection[SequenceGroup]) -> None:
        """Put all sequences of all live requests in another policy's order, or in the same one's by other options."""
        waiting, running = [*self.waiting], [*self.running]
        for group in groups:  # under the options by which it came
            self.policy.on_ended(group.request)
        self._use_policy(self._config)
        for group in groups:
            self.enrol(group, is_new=False)
            for sequence in group.sequences.values():
                sequence.key = self._seat(sequence) if sequence.status is SequenceStatus.RUNNING else sequence.own_key
        for sequence in waiting:
            self.waiting.add(sequence)
        self.running = sorted(running, key=lambda sequence: sequence.key)

    def _use_policy(self, config: SchedulerConfig) -> None:
        kind = POLICIES[config.policy]
        if type(self.policy) is not kind:  # else it goes on with what it knows
            self.policy = kind(config.policy_options)
        self.policy.options = config.policy_options
        self.watches_service = kind.on_served is not Policy.on_served
        self.waiting = WaitingQueue(self.policy.rank)

    def budget(self) -> int:
        """Tokens of the next step: one each for what runs, at least, for limits may have been lowered meanwhile."""
        limit, num_running = self._config.max_num_batched_tokens, len(self.running)
        if self._config.enable_chunked_prefill:  # a prompt can be no smaller otherwise
            limit = self.policy.budget(limit, num_running)
        return max(limit, num_running)

    # Sequences come and go.

    def enrol(self, group: SequenceGroup, is_new: bool = True) -> None:
        """Ask the policy for a request's place; a request that is not new to it keeps what it is owed."""
        policy, request = self.policy, group.request
        group.lane = lane = policy.lane(request)
        policy.on_added(request, not is_new or self.waiting.has(lane), self.waiting.lowest_rank)
        group.key = policy.key(request, group.order)

    def start_fork(self, child: Sequence, parent: Sequence, token_id: int) -> None:
        """A waiting sequence gets its running parent's blocks, and runs: the next plan copies the row, adds a token."""
        num_shared = child.num_computed_tokens = parent.num_computed_tokens
        child.table = self._kv.fork(parent.table, child.sequence_id, child.output_token_ids, num_shared)
        self.waiting.remove(child)
        self._start(child)
        child.announced = True
        self.counts.num_forks_total += 1
        own_id, index = child.sequence_id, child.group.task.first_sequence_index + child.index
        self._forks[own_id] = Fork(own_id, parent.sequence_id, index, num_shared, token_id)

    def drop(self, sequence: Sequence) -> None:
        """Take out a sequence that has ended."""
        self._kv.drop_swapped(sequence.table)
        if sequence.status is SequenceStatus.RUNNING:
            self._withdraw(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        else:
            self._leave_preparing(sequence)
        sequence.status = SequenceStatus.FINISHED

    def sit_out(self, sequence: Sequence) -> None:
        """A sequence's next token depends on siblings; it keeps its blocks while nobody who can go on needs them."""
        sequence.sits_out = True
        sequence.settle()
        if sequence.status is SequenceStatus.PREPARING:
            self._leave_preparing(sequence)
            self._prepare(sequence, "siblings")

    def set_aside(self, sequence: Sequence, reason: str) -> None:
        """A waiting sequence can't run yet, for a reason of `REASONS`; `make_ready` ends that."""
        self.waiting.remove(sequence)
        self._prepare(sequence, reason)

    def make_ready(self, sequence: Sequence) -> None:
        """A preparing sequence could run now."""
        self._leave_preparing(sequence)
        sequence.status = SequenceStatus.WAITING
        self.waiting.add(sequence)

    def note_served(self, group: SequenceGroup, num_tokens: int) -> None:
        """So many tokens were drawn for a request: its lane's turn may come later for it."""
        self.policy.on_served(group.request, num_tokens)
        self.waiting.reorder(group.lane)

    def start_anew(self) -> None:
        """Workers know nothing any more: whatever runs waits again, and everyone will be announced."""
        for sequence in [*self.running]:
            self._withdraw(sequence)
            self._prepare(sequence, "siblings")
        for sequence in [*self.preparing.values()]:
            if not sequence.sits_out and sequence.awaits not in ("adapter", "grammar"):
                self.make_ready(sequence)
        for sequence in [*self.waiting, *self.preparing.values()]:
            sequence.num_in_flight = 0
            sequence.forget_row()
            sequence.settle()
            sequence.group.announced = False
        self._kv.cancel()
        self._kv.settled.clear()
        self._removed, self.ended, self._forks, self._prefixes = [], {}, {}, {}
        self.reason = None

    # What may be asked.

    def held_rows(self) -> list[int]:
        """The sequences whose rows workers hold now that no plan is in flight, ascending."""
        held = [s.sequence_id for s in self.running if s.announced and s.sequence_id not in self._forks]
        return sorted(held + self._removed)

    # Those that run.

    def _continue_running(self, builder: PlanBuilder) -> None:
        """Schedule what runs: first one token each for those that have caught up, so that no prompt stalls them.

        Where the pipeline has several stages, a part of it, so that each stage has some.
        """
        running, scheduled, append, add = self.running, builder.scheduled, self._kv.append, builder.add_next
        most = -(-len(running) // self._config.num_stages)
        behind: list[Sequence] = []
        place = 0
        while place < len(running) and len(scheduled) < most:
            sequence = running[place]
            place += 1
            start = sequence.num_scheduled
            num_left = sequence.num_expected - start
            if num_left != 1:
                if num_left > 1:
                    behind.append(sequence)
                continue
            table = sequence.table
            if sequence.num_drafts:
                # Whoever comes after it and has caught up is to get its one token, too; who is behind, at least one.
                num_others = min(len(running) - place + len(behind), most - len(scheduled) - 1)
                self._verify_drafts(sequence, builder, builder.budget - num_others)
            elif start < table.num_slots and table.shared_block < 0:  # what `append` would find, without a call
                add(sequence, start, NOTHING_APPENDED)
            elif (appended := append(table, start, start + 1)) is not None:
                add(sequence, start, appended)
            else:
                # The last of the queue is not in the plan yet: it is behind, still to be looked at, or this one itself.
                self._continue(sequence, 1, builder)
        for sequence in behind:
            if builder.budget and len(scheduled) < most and sequence.status is SequenceStatus.RUNNING:
                num_left = sequence.num_expected - sequence.num_scheduled
                self._continue(sequence, self._chunk(num_left, builder.budget), builder)

    def _verify_drafts(self, sequence: Sequence, builder: PlanBuilder, budget: int) -> None:
        """Schedule a sequence's next token and as many of its drafts as there is room for; they preempt nobody."""
        start = sequence.num_scheduled
        # With all drafts accepted and one token more it may just reach its limit.
        most, tree = sequence.group.limit - sequence.num_tokens - 1, self._config.draft_tree
        if tree is not None:  # so many levels of it
            most = tree.num_within(most)
        num_drafts = min(sequence.num_drafts, budget - 1, most)
        num_held = sequence.table.num_slots - start - 1
        # Drafts get no block more where one that runs or waits might need it in this step.
        if num_drafts > num_held and (self.waiting or min(self._kv.num_free_blocks) <= len(self.running) + num_drafts):
            num_drafts = num_held
        while num_drafts > 0:
            if (appended := self._kv.append(sequence.table, start, start + 1 + num_drafts)) is not None:
                builder.add(sequence, 1 + num_drafts, appended, num_drafts)
                return
            num_drafts //= 2
        self._continue(sequence, 1, builder)

    def _continue(self, sequence: Sequence, num_new_tokens: int, builder: PlanBuilder) -> None:
        """Schedule tokens of a running sequence; while blocks lack, the last of the queue is preempted.

        When that is the sequence itself, it makes do with a smaller part, or is preempted if there is none.
        """
        start, running = sequence.num_scheduled, self.running
        while (appended := self._kv.append(sequence.table, start, start + num_new_tokens)) is None:
            if running[-1] is sequence and num_new_tokens > 1:
                num_new_tokens //= 2
                continue
            self._preempt(running[-1], builder)
            self.reason = "blocks"  # and so nobody is admitted: that would take what was just made free
            if sequence.status is not SequenceStatus.RUNNING:
                return
        builder.add(sequence, num_new_tokens, appended)

    # Those that wait.

    def _wake_readers(self) -> None:
        """Let those wait for their turn again whose prefix another one has computed, or given up."""
        for name in self._kv.settled:
            for sequence in self._prefixes.pop(name, ()):
                if sequence.status is SequenceStatus.PREPARING:  # and not aborted meanwhile
                    self.make_ready(sequence)
        self._kv.settled.clear()

    def _admit_waiting(self, builder: PlanBuilder) -> None:
        """Admit waiting sequences in order until there is a reason not to."""
        while len(self.waiting) and self.reason is None:
            self.reason = self._try_admit(self.waiting.first, builder)

    def _try_admit(self, sequence: Sequence, builder: PlanBuilder) -> str | None:
        """Admit the first waiting sequence, or let it prepare; or say why nobody more is admitted."""
        if not builder.budget:
            return "budget"
        if len(self.running) >= self.max_running and not self._outranked_by(sequence):
            return "capacity"
        group, table = sequence.group, sequence.table
        match = self._kv.match_swapped(table) if group.owes_prompt_logprobs else self._kv.match_prefix(table)
        if match.awaits is not None:
            self._await_prefix(sequence, match.awaits, "prefix")
            return None
        if not group.owes_prompt_logprobs and (name := self._kv.fetch(table, match)) is not None:
            self._await_prefix(sequence, name, "disk")
            return None
        num_left = sequence.num_tokens - match.num_tokens
        num_new = self._chunk(num_left, builder.budget)
        if num_new < num_left and not self._config.enable_chunked_prefill:
            return "budget"
        num_new = self._make_room(sequence, match, num_new, builder)
        if not num_new:
            return "blocks"
        self._kv.allocate(table, match, num_new)
        sequence.num_computed_tokens = match.num_tokens
        sequence.settle()
        self.waiting.remove(sequence)
        self._start(sequence)
        if group.num_cached_tokens is None:
            group.num_cached_tokens = match.num_tokens
            self.counts.prefix_cache_hits_total += match.num_tokens
            self.counts.prefix_cache_queries_total += sequence.num_tokens
            self.policy.on_admitted(group.request, num_left)
            self.waiting.reorder(group.lane)
        builder.add(sequence, num_new, NOTHING_APPENDED)
        return None

    def _await_prefix(self, sequence: Sequence, name: bytes, reason: str) -> None:
        """Set aside a waiting sequence until a block has been computed for another, or read, at no cost till then."""
        self._kv.watch(name)
        self._prefixes.setdefault(name, []).append(sequence)
        self.set_aside(sequence, reason)

    def _chunk(self, num_left: int, budget: int) -> int:
        """Tokens of one sequence that go in this step."""
        return min(num_left, budget, self._config.long_prefill_token_threshold or num_left)

    def _make_room(self, sequence: Sequence, match: PrefixMatch, num_new_tokens: int, builder: PlanBuilder) -> int:
        """Place and blocks for a waiting sequence; preempts worse ones if the policy says so.

        Returns:
            The tokens that can be computed now: all of `num_new_tokens` or, where nothing else runs, fewer; 0 when
            there is no room.
        """
        kv, table, running = self._kv, sequence.table, self.running
        # What runs can grow a little before anything is preempted again.
        num_short = kv.shortage(table, match, num_new_tokens, spares=bool(running))
        if len(running) < self.max_running and num_short <= 0:
            return num_new_tokens
        outranked = self._outranked_by(sequence)
        can_free = sum(max(map(len, victim.table.block_ids)) for victim in outranked)
        if running and (num_short > can_free or len(running) - len(outranked) >= self.max_running):
            return 0
        while len(running) >= self.max_running or kv.shortage(table, match, num_new_tokens) > 0:
            if outranked:
                # What is found on the host is not owned yet, and nothing may take its place there.
                self._preempt(outranked.pop(), builder, may_swap=match.is_swapped or not match.num_from_host)
            elif running or num_new_tokens == 1:
                return 0
            else:
                num_new_tokens //= 2
        return num_new_tokens

    def _outranked_by(self, sequence: Sequence) -> list[Sequence]:
        """Running sequences that the policy lets a waiting one preempt, in order."""
        request, running = sequence.group.request, self.running
        first = len(running)
        while first and self.policy.preempts(request, running[first - 1].group.request):
            first -= 1
        return running[first:]

    def _unseat(self, builder: PlanBuilder) -> None:
        """Nobody who runs can go on: those that sit out make room for those that wait, the last in order first."""
        sitting = [sequence for sequence in self.running if sequence.sits_out]
        while sitting and not builder.scheduled and len(self.waiting):
            self._preempt(sitting.pop(), builder)
            self._wake_readers()
            self.reason = None
            self._admit_waiting(builder)

    # Changing places.

    def _start(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        sequence.key = self._seat(sequence)
        insert(self.running, sequence)

    def _seat(self, sequence: Sequence) -> tuple[Any, ...]:
        """Its key among those that run."""
        group = sequence.group
        return (*self.policy.seat(group.request, group.key), sequence.index)

    def _preempt(self, sequence: Sequence, builder: PlanBuilder, may_swap: bool = True) -> None:
        """Take a running sequence's blocks, whose content goes to the host if that is cheaper.

        Otherwise all its tokens, outputs included, will be computed again.
        """
        if may_swap:
            self._kv.swap_out(sequence.table, sequence.num_computed_tokens)
        builder.drop(sequence)
        self._withdraw(sequence)
        self.counts.num_preemptions_total += 1
        if sequence.num_in_flight:
            self._prepare(sequence, "result")
        elif sequence.sits_out:
            self._prepare(sequence, "siblings")
        else:
            sequence.settle()
            sequence.status = SequenceStatus.WAITING
            self.waiting.add(sequence)

    def _prepare(self, sequence: Sequence, awaits: str) -> None:
        sequence.status = SequenceStatus.PREPARING
        sequence.awaits = awaits
        self.preparing[sequence.sequence_id] = sequence
        self.num_preparing[awaits] = self.num_preparing.get(awaits, 0) + 1

    def _leave_preparing(self, sequence: Sequence) -> None:
        del self.preparing[sequence.sequence_id]
        self.num_preparing[sequence.awaits] -= 1
        sequence.awaits = ""

    def _withdraw(self, sequence: Sequence) -> None:
        """Take a running sequence's place, blocks and row."""
        remove(self.running, sequence)
        sequence.key = sequence.own_key
        self._kv.free(sequence.table)
        if self._forks.pop(sequence.sequence_id, None) is None and sequence.announced:
            self._removed.append(sequence.sequence_id)
        sequence.forget_row()
