"""The scheduler: takes requests, plans steps, and says what a step's result means.

The engine core calls `schedule` and `update` in turn; requests may be added and aborted at any time. There is no
prefill and no decode here: each sequence has computed so many of its tokens, and each step spends a budget of tokens
on catching up. It sees token ids and block ids, never text or tensors.
"""

from collections.abc import Iterable

from quire.config.scheduler import SchedulerConfig
from quire.errors import InvalidRequestError
from quire.kvcache.manager import KVManager
from quire.protocol.step import NewRequest, PromptLogprobs, SequenceOutput, StepPlan, StepResult, TokenLogprobs
from quire.scheduler.limits import check_request_fits
from quire.scheduler.planner import Planner
from quire.scheduler.sequence import Sequence, SequenceGroup, SequenceStatus


class Scheduler:
    """Continuous batching over paged KV.

    A step first gives one token to every running sequence that has caught up, then the rest of its budget to running
    sequences that have not, in the policy's order; then waiting ones are admitted, strictly in order. When blocks
    run out, the running sequence that is last in order is preempted: it loses its blocks and waits, at its old
    place, to be computed anew. The first one always advances, so that everything ends.

    Attributes:
        kv: the KV manager.

    Raises:
        ConfigError: no such policy.
    """

    def __init__(self, config: SchedulerConfig, kv_manager: KVManager) -> None:
        self.config = config
        self.kv = kv_manager
        self._planner = Planner(config, kv_manager)
        self._groups: dict[str, SequenceGroup] = {}
        self._live: dict[int, Sequence] = {}
        self._num_added = 0
        self._num_sequences = 0
        self._step_id = 0
        self._in_flight: int | None = None

    # Requests come and go.

    def add(self, request: NewRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: its id is in use, or it could never run in this engine.
        """
        if request.request_id in self._groups:
            raise InvalidRequestError(f"request_id {request.request_id!r} is in use; choose another.", "request_id")
        check_request_fits(request, self.config, self.kv)
        group = SequenceGroup(request, self._planner.policy.key(request, self._num_added))
        self._num_added += 1
        self._groups[request.request_id] = group
        self._make_sequence(group, 0)

    def abort(self, request_ids: str | Iterable[str]) -> list[SequenceOutput]:
        """End requests now; returns one output for each sequence that had not ended. Unknown ids are ignored."""
        outputs: list[SequenceOutput] = []
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            if request_id in self._groups:
                outputs += self._end_request(self._groups[request_id], "abort")
        return outputs

    def finish_sequence(self, request_id: str, sequence_index: int) -> None:
        """End one sequence silently: the caller knows why. Does nothing if it has ended already."""
        group = self._groups.get(request_id)
        if group is None or sequence_index not in group.unfinished:
            return
        group.unfinished.remove(sequence_index)
        # The root computes the prompt for the others, so it stays until they are forked off, or until none is left.
        if group.forked or not group.unfinished:
            self._drop(group.sequences[sequence_index if group.forked else 0])

    def has_unfinished(self) -> bool:
        """Whether any request is unfinished: then `schedule` returns work."""
        return bool(self._groups)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False, with nothing done, while a sequence is running."""
        return self.kv.reset_prefix_cache()

    # A step.

    def schedule(self) -> StepPlan:
        """Plan the next step. `update` must have been called for the one before."""
        assert self._in_flight is None, "schedule() called twice without update()"
        self._in_flight = self._step_id
        self._step_id += 1
        return self._planner.plan(self._in_flight)

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]:
        """Take in what a step brought: append tokens, end, free and fork sequences.

        Results of sequences that ended while the step was under way are dropped.
        """
        assert plan.step_id == result.step_id == self._in_flight, "update() with another step's plan or result"
        self._in_flight = None
        outputs: list[SequenceOutput] = []
        for sequence_id, message in result.errors.items():
            if sequence_id in self._live:
                outputs += self._end_request(self._live[sequence_id].group, "error", message)
        position = 0
        for item in plan.scheduled:
            first = position
            position += item.num_samples
            sequence = self._live.get(item.sequence_id)
            if sequence is None:
                continue
            sequence.num_computed_tokens += item.num_new_tokens
            self.kv.commit(sequence.table, sequence.num_computed_tokens)
            prompt_logprobs = None
            if result.prompt_logprobs:
                prompt_logprobs = self._undelivered(sequence, result.prompt_logprobs.get(item.sequence_id))
            if not item.num_samples:
                if prompt_logprobs is not None:
                    outputs.append(
                        SequenceOutput(
                            request_id=sequence.group.request.request_id,
                            sequence_index=sequence.index,
                            new_token_ids=[],
                            prompt_logprobs=prompt_logprobs,
                            num_cached_tokens=sequence.group.num_cached_tokens or 0,
                        )
                    )
                continue
            logprobs = result.logprobs.get(item.sequence_id)
            if sequence.group.forked:
                token_id = result.token_ids[first]
                outputs.append(self._append_token(sequence, token_id, logprobs, prompt_logprobs))
            else:
                token_ids = result.token_ids[first:position]
                outputs += self._fork(sequence, token_ids, logprobs, prompt_logprobs)
        assert position == len(result.token_ids), "the result has more or fewer tokens than the plan asked for"
        return outputs

    # What may be asked.

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._planner.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold none."""
        return len(self._planner.waiting)

    @property
    def num_preemptions(self) -> int:
        """Sequences preempted since the start."""
        return self._planner.num_preemptions

    @property
    def prefix_cache_queries(self) -> int:
        """Prompt tokens looked up in the prefix cache at requests' first admission, since the start."""
        return self._planner.prefix_cache_queries

    @property
    def prefix_cache_hits(self) -> int:
        """Prompt tokens found there."""
        return self._planner.prefix_cache_hits

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV blocks in use, 0 to 1."""
        return self.kv.usage

    def waiting_reasons(self) -> dict[str, int]:
        """Why sequences wait -> how many; the reasons are those of `Planner.waiting_reasons`."""
        return self._planner.waiting_reasons()

    def sequences(self) -> list[Sequence]:
        """All live sequences, the running ones first, each part in the policy's order."""
        return [*self._planner.running, *self._planner.waiting]

    def why(self, request_id: str) -> str | None:
        """Why a request waits, with numbers; None when nothing of it waits, or it is unknown."""
        group = self._groups.get(request_id)
        return next(filter(None, map(self.why_waiting, group.sequences.values() if group else ())), None)

    def why_waiting(self, sequence: Sequence) -> str | None:
        """Why a sequence waits, or None when it does not."""
        return self._planner.why(sequence) if sequence.status is SequenceStatus.WAITING else None

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues, groups, tables and the pool agree. O(everything)."""
        self.kv.check_integrity()
        running, waiting = self._planner.running.items, self._planner.waiting.items
        assert len(running) <= self._planner.max_running, "more sequences run than may"
        for queue, status in ((running, SequenceStatus.RUNNING), (waiting, SequenceStatus.WAITING)):
            assert all(a.key < b.key for a, b in zip(queue, queue[1:], strict=False)), "a queue is out of order"
            assert all(s.status is status for s in queue), "a sequence is in the wrong queue"
        queued = {s.sequence_id: s for s in [*running, *waiting]}
        assert queued == self._live, "a live sequence is in no queue, or a dead one in one"
        assert queued == {s.sequence_id: s for g in self._groups.values() for s in g.sequences.values()}
        for s in queued.values():
            where = f"sequence {s.sequence_id}"
            assert s.num_tokens == s.table.num_tokens, f"{where} counts its tokens wrong"
            assert 0 <= s.num_computed_tokens < s.num_tokens, f"{where} computed more than it has"
            num_blocks = len(s.table.block_ids)
            if s.status is SequenceStatus.RUNNING:
                assert num_blocks >= self.kv.num_blocks_for(s.num_computed_tokens), f"{where} lacks blocks"
            else:
                assert num_blocks == s.num_computed_tokens == s.announced == 0, f"{where} waits with blocks or a row"
        for group in self._groups.values():
            assert group.unfinished, f"request {group.request.request_id} has ended and is still known"
            assert not group.forked or group.sequences.keys() == group.unfinished
        assert running or self.kv.num_free_blocks == self.kv.num_blocks, "idle, but blocks are held"

    # Taking in results.

    def _append_token(
        self,
        sequence: Sequence,
        token_id: int,
        logprobs: list[TokenLogprobs] | None,
        prompt_logprobs: PromptLogprobs | None,
    ) -> SequenceOutput:
        """Append a sampled token; the sequence ends if it was its last."""
        group, output_token_ids = sequence.group, sequence.output_token_ids
        output_token_ids.append(token_id)
        sequence.num_tokens += 1
        finish_reason = stop_reason = None
        if token_id in group.stop_token_ids and len(output_token_ids) >= group.min_tokens:
            finish_reason = "stop"
            stop_reason = token_id if token_id in group.request.sampling_params.stop_token_ids else None
        elif len(output_token_ids) >= group.max_tokens or sequence.num_tokens >= self.config.max_model_len:
            finish_reason = "length"
        if finish_reason is not None:
            group.unfinished.remove(sequence.index)
            self._drop(sequence)
        return SequenceOutput(
            request_id=group.request.request_id,
            sequence_index=sequence.index,
            new_token_ids=[token_id],
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=group.num_cached_tokens or 0,
        )

    def _fork(
        self,
        root: Sequence,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        prompt_logprobs: PromptLogprobs | None,
    ) -> list[SequenceOutput]:
        """The prompt of a request with several sequences is computed: each gets its own first token.

        The others share the root's blocks, as far as there are places to run in; the rest waits without blocks.
        """
        group = root.group
        group.forked = True
        outputs: list[SequenceOutput] = []
        for index in range(1, group.num_sequences):
            if index not in group.unfinished:
                continue
            child = self._make_sequence(group, index)
            outputs.append(self._append_token(child, token_ids[index], logprobs and [logprobs[index]], None))
            if child.status is SequenceStatus.WAITING and len(self._planner.running) < self._planner.max_running:
                num_shared = root.num_computed_tokens
                child.table = self.kv.fork(root.table, child.sequence_id, child.output_token_ids, num_shared)
                child.num_computed_tokens = num_shared
                self._planner.start(child)
        if 0 in group.unfinished:
            outputs.insert(0, self._append_token(root, token_ids[0], logprobs and logprobs[:1], prompt_logprobs))
        else:
            self._drop(root)
        return outputs

    def _undelivered(self, sequence: Sequence, part: PromptLogprobs | None) -> PromptLogprobs | None:
        """What is new of some prompt logprobs: after a preemption they are computed, and come, once more."""
        group = sequence.group
        if part is None or part.start + len(part.entries) <= group.num_prompt_logprobs:
            return None
        num_known = group.num_prompt_logprobs - part.start
        assert num_known >= 0, "prompt logprobs are missing"
        group.num_prompt_logprobs = part.start + len(part.entries)
        return PromptLogprobs(start=part.start + num_known, entries=part.entries[num_known:])

    # Beginnings and ends.

    def _make_sequence(self, group: SequenceGroup, index: int) -> Sequence:
        """A new sequence of a request, waiting."""
        request, sequence_id = group.request, self._num_sequences
        self._num_sequences += 1
        table = self.kv.open(sequence_id, request.prompt_token_ids, [], request.cache_salt)
        sequence = Sequence(sequence_id, group, index, table)
        self._live[sequence_id] = group.sequences[index] = sequence
        self._planner.waiting.add(sequence)
        return sequence

    def _end_request(self, group: SequenceGroup, reason: str, error: str | None = None) -> list[SequenceOutput]:
        """End all unfinished sequences of a request, each with an output."""
        outputs = [
            SequenceOutput(
                request_id=group.request.request_id,
                sequence_index=index,
                new_token_ids=[],
                finish_reason=reason,
                num_cached_tokens=group.num_cached_tokens or 0,
                error=error,
            )
            for index in sorted(group.unfinished)
        ]
        group.unfinished.clear()
        for sequence in list(group.sequences.values()):
            self._drop(sequence)
        return outputs

    def _drop(self, sequence: Sequence) -> None:
        """Forget a sequence, and its request with the last one."""
        self._planner.drop(sequence)
        group = sequence.group
        del self._live[sequence.sequence_id]
        del group.sequences[sequence.index]
        if not group.sequences:
            del self._groups[group.request.request_id]
