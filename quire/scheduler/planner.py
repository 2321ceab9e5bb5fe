"""The planner: which tokens of which sequences the next step computes, and who has to make room for whom.

The scheduler's half that looks ahead: it keeps the two queues and asks the KV manager for blocks. It knows
nothing of results, and of requests only what their policy makes of them.
"""

from quire.config.scheduler import SchedulerConfig
from quire.errors import ConfigError
from quire.kvcache.manager import NO_MATCH, KVManager, PrefixMatch
from quire.protocol.step import StepPlan
from quire.scheduler.plan_builder import PlanBuilder
from quire.scheduler.policy import POLICIES
from quire.scheduler.queue import SequenceQueue
from quire.scheduler.sequence import Sequence, SequenceStatus


class Planner:
    """The running and the waiting sequences, and the rules by which they change places.

    Attributes:
        policy: orders both queues.
        running: sequences that hold blocks.
        waiting: sequences that hold none.
        max_running: most sequences that run at once.
        num_preemptions: sequences preempted since the start.
        prefix_cache_queries, prefix_cache_hits: prompt tokens looked up, and found, at requests' first admission.

    Raises:
        ConfigError: no such policy.
    """

    def __init__(self, config: SchedulerConfig, kv: KVManager) -> None:
        if config.policy not in POLICIES:
            known = ", ".join(map(repr, POLICIES))
            raise ConfigError(f"scheduling policy must be one of {known}, got {config.policy!r}.")
        self.policy = POLICIES[config.policy]()
        self.running = SequenceQueue()
        self.waiting = SequenceQueue()
        self.max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._config = config
        self._kv = kv
        # Left free at admission so that what runs can grow a little before anything is preempted again.
        self._num_spare_blocks = kv.num_blocks // 100
        self._removed: list[int] = []  # rows for the runner to drop with the next plan
        self._reason: str | None = None  # why the first waiting sequence was not admitted; None: not looked at yet

    def plan(self, step_id: int) -> StepPlan:
        """The next step. Schedules something whenever there is any sequence."""
        builder = PlanBuilder(self._config.max_num_batched_tokens)
        self._reason = None
        if self._config.enable_chunked_prefill:
            self._continue_running(builder)
            self._admit_waiting(builder)
        else:
            self._admit_waiting(builder)
            if not builder.scheduled:
                self._continue_running(builder)
        removed, self._removed = self._removed, []
        return builder.plan(step_id, removed, self._kv.end_plan())

    def start(self, sequence: Sequence) -> None:
        """Move a waiting sequence, which has got its blocks, to those that run."""
        self.waiting.remove(sequence)
        sequence.status = SequenceStatus.RUNNING
        self.running.add(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Take out a sequence that has ended."""
        if sequence.status is SequenceStatus.RUNNING:
            self._withdraw(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED

    def waiting_reasons(self) -> dict[str, int]:
        """Why sequences wait -> how many.

        "capacity": max_num_seqs are running. "budget": the step's tokens were spent. "blocks": too few are free.
        "prefix": its beginning is just being computed for another request, and will be shared. "order": another one
        comes first. "next_step": added since the last step was planned.
        """
        num_waiting = len(self.waiting)
        if not num_waiting:
            return {}
        reason = self._reason or "next_step"
        if reason not in ("blocks", "prefix") or num_waiting == 1:
            return {reason: num_waiting}
        return {reason: 1, "order": num_waiting - 1}

    def why(self, sequence: Sequence) -> str:
        """Why a waiting sequence waits: a reason of `waiting_reasons`, and its numbers."""
        reason = self._reason or "next_step"
        if reason in ("blocks", "prefix") and self.waiting.items[0] is not sequence:
            reason = "order"
        num_blocks = self._kv.num_blocks_for(sequence.num_tokens)
        numbers = {
            "capacity": f"{len(self.running)} sequences run, and at most {self.max_running} may",
            "budget": f"the step's {self._config.max_num_batched_tokens} tokens were spent on sequences before it",
            "blocks": f"it needs up to {num_blocks} KV blocks, and {self._kv.num_free_blocks} are free",
            "prefix": "its beginning is being computed for another request",
            "order": "another request comes first",
            "next_step": "no step was planned since it came",
        }
        return f"{reason}: {numbers[reason]}"

    def _continue_running(self, builder: PlanBuilder) -> None:
        """Schedule what runs: first one token each for those that have caught up, so that no prompt stalls them."""
        running, append = self.running.items, self._kv.append
        behind: list[Sequence] = []
        place = 0
        while place < len(running):
            sequence = running[place]
            place += 1
            start = sequence.num_computed_tokens
            if sequence.num_tokens - start > 1:
                behind.append(sequence)
                continue
            while (blocks := append(sequence.table, start, start + 1)) is None:
                # The last of the queue is not in the plan yet: it is behind, still to be looked at, or this one itself.
                self._preempt(running[-1], builder)
                self._reason = "blocks"  # and so nobody is admitted: that would take what was just made free
                if sequence.status is not SequenceStatus.RUNNING:
                    break
            else:
                builder.add(sequence, 1, blocks)
        for sequence in behind:
            # None of them was preempted above, and their blocks were all allocated at admission.
            if builder.budget:
                num_left = sequence.num_tokens - sequence.num_computed_tokens
                builder.add(sequence, self._chunk(num_left, builder.budget), [])

    def _admit_waiting(self, builder: PlanBuilder) -> None:
        """Admit waiting sequences in order until there is a reason not to."""
        while self.waiting.items and self._reason is None:
            self._reason = self._try_admit(self.waiting.items[0], builder)

    def _try_admit(self, sequence: Sequence, builder: PlanBuilder) -> str | None:
        """Admit the first waiting sequence, with blocks for all its tokens, or say why not."""
        if not builder.budget:
            return "budget"
        if len(self.running) >= self.max_running and not self._outranked_by(sequence):
            return "capacity"
        group, table = sequence.group, sequence.table
        match = NO_MATCH if group.owes_prompt_logprobs else self._kv.match_prefix(table)
        if match.next_is_computing:
            return "prefix"
        num_cached = len(match.block_ids) * self._kv.block_size
        num_left = sequence.num_tokens - num_cached
        num_new = self._chunk(num_left, builder.budget)
        if num_new < num_left and not self._config.enable_chunked_prefill:
            return "budget"
        if not self._make_room(sequence, match, builder):
            return "blocks"
        self._kv.allocate(table, match)
        sequence.num_computed_tokens = num_cached
        self.start(sequence)
        if group.num_cached_tokens is None:
            group.num_cached_tokens = num_cached
            self.prefix_cache_hits += num_cached
            self.prefix_cache_queries += sequence.num_tokens
        builder.add(sequence, num_new, [])
        return None

    def _chunk(self, num_left: int, budget: int) -> int:
        """Tokens of one sequence that go in this step."""
        return min(num_left, budget, self._config.long_prefill_token_threshold or num_left)

    def _make_room(self, sequence: Sequence, match: PrefixMatch, builder: PlanBuilder) -> bool:
        """Whether place and blocks for a waiting sequence are there; preempts worse ones if the policy says so."""
        num_spare = self._num_spare_blocks if self.running.items else 0
        num_short = self._kv.shortage(sequence.table, match) + num_spare
        if num_short <= 0 and len(self.running) < self.max_running:
            return True
        outranked = self._outranked_by(sequence)
        if num_short > sum(len(victim.table.block_ids) for victim in outranked):
            return False
        while len(self.running) >= self.max_running or self._kv.shortage(sequence.table, match) > 0:
            if not outranked:
                return False
            self._preempt(outranked.pop(), builder)
        return True

    def _outranked_by(self, sequence: Sequence) -> list[Sequence]:
        """Running sequences that the policy lets a waiting one preempt, in order."""
        request, running = sequence.group.request, self.running.items
        first = len(running)
        while first and self.policy.preempts(request, running[first - 1].group.request):
            first -= 1
        return running[first:]

    def _preempt(self, sequence: Sequence, builder: PlanBuilder) -> None:
        """Back to the waiting, without blocks; all its tokens, outputs included, will be computed again."""
        builder.drop(sequence)
        self._withdraw(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_computed_tokens = 0
        self.waiting.add(sequence)
        self.num_preemptions += 1

    def _withdraw(self, sequence: Sequence) -> None:
        """Take a running sequence's place, blocks and row."""
        self.running.remove(sequence)
        self._kv.free(sequence.table)
        if sequence.announced:
            sequence.announced = False
            self._removed.append(sequence.sequence_id)
