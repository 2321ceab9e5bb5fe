"""What a step's result means for its sequences: tokens are appended, sequences fork and end, outputs are made.

The scheduler's half that looks back; `Scheduler.update` calls it. It keeps the live requests and sequences, and leaves
the queues to the planner.
"""

from itertools import count

from msgspec import structs

from quire.config.scheduler import SchedulerConfig
from quire.kvcache.manager import KVManager
from quire.metrics.drafts import DraftCounts
from quire.protocol.requests import NewRequest
from quire.protocol.step import Failure, FailureKind, Sampling, ScheduledSequence, SequenceOutput, SequenceResult
from quire.scheduler.continuation import Branch, Continuation
from quire.scheduler.planner import Planner
from quire.scheduler.sequence import Sequence, SequenceGroup, SequenceStatus

_NONE, _DRAW, _RANK = Sampling.NONE, Sampling.DRAW, Sampling.RANK
_RUNNING, _PREPARING, _FINISHED = SequenceStatus.RUNNING, SequenceStatus.PREPARING, SequenceStatus.FINISHED
Outputs = list[SequenceOutput]
MANY_GUIDED = 8  # requests with a grammar, from which on a thread of their own is worth its while


class Outcomes:
    """The live requests, and what becomes of them.

    Attributes:
        groups: live requests by id.
        num_guided: live requests with a grammar.
        drafts: what became of drafts.
        config: the scheduler's, as it began.
    """

    def __init__(self, planner: Planner, kv: KVManager, config: SchedulerConfig) -> None:
        self.groups: dict[str, SequenceGroup] = {}
        self.num_guided = 0
        self._orders, self._sequence_ids = count(), count()
        self.drafts = DraftCounts(config.draft_tree)
        self._planner, self._kv = planner, kv
        self.config = config

    # Beginnings.

    def open(self, request: NewRequest, continuation: Continuation) -> SequenceGroup:
        """A new request, without sequences."""
        group = SequenceGroup(request, next(self._orders), continuation, self.config.max_model_len)
        self._planner.enrol(group)
        self.groups[request.request_id] = group
        self.num_guided += group.task.has_grammar
        return group

    def make_sequence(self, group: SequenceGroup, index: int, output_token_ids: list[int]) -> Sequence:
        """A new sequence of a request, waiting."""
        sequence_id = next(self._sequence_ids)
        table = self._kv.open(sequence_id, group.request.prompt_token_ids, output_token_ids, group.root)
        sequence = Sequence(sequence_id, group, index, table)
        group.sequences[index] = sequence
        self._planner.waiting.add(sequence)
        return sequence

    # Results.

    def take(self, sequences: list[Sequence], items: list[ScheduledSequence], results: list[SequenceResult]) -> Outputs:
        """Take in what a step brought its sequences; results of those that have ended are dropped."""
        # Whole requests fail, so before anything is made of their other sequences' results.
        outputs = self._take_failures(sequences, results)
        decode, num_failed = self._decode, len(outputs)
        served: dict[str, SequenceGroup] = {}
        if self._planner.watches_service:
            served = {s.group.request_id: s.group for s in sequences if s.status is not _FINISHED}
        for sequence, item, found in zip(sequences, items, results, strict=True):
            if sequence.status is _FINISHED:
                continue
            sequence.num_in_flight -= 1
            if decode(sequence, item, found, outputs):
                continue
            if found.prompt_logprobs is not None:
                found = structs.replace(found, prompt_logprobs=sequence.group.undelivered(found.prompt_logprobs))
            if item.sampling is _DRAW and item.num_samples == 1:
                outputs += self._draw(sequence, item, found)
                continue
            self._advance(sequence, item.num_new_tokens)
            if item.sampling is not _NONE:
                outputs += self._branch(sequence, item.sampling, found)
            else:
                self._settle(sequence, 0)
                if found.prompt_logprobs is not None:
                    outputs.append(sequence.group.output(sequence.index, [], None, found.prompt_logprobs))
        if served:
            for output in outputs[num_failed:]:
                group = served[output.request_id]
                if group.continuation.tells_tokens:
                    self._planner.note_served(group, len(output.new_token_ids))
        return outputs

    def _take_failures(self, sequences: list[Sequence], results: list[SequenceResult]) -> Outputs:
        outputs: Outputs = []
        for sequence, found in zip(sequences, results, strict=True):
            if (failure := found.failure) is None or sequence.status is _FINISHED:
                continue
            if sequence.matcher is not None and (error := sequence.matcher.error) is not None:
                failure = Failure(FailureKind.BAD_REQUEST, error, "structured_outputs")
            if (told := found.prompt_logprobs) is not None:  # as steps before have told theirs
                outputs.append(sequence.group.output(sequence.index, [], None, sequence.group.undelivered(told)))
            outputs += self.end_request(sequence.group, "error", failure)
        return outputs

    def _decode(self, sequence: Sequence, item: ScheduledSequence, found: SequenceResult, outputs: Outputs) -> bool:
        """Most results by far, in one go: a running sequence has got one token and goes on; False for all others."""
        group, tokens = sequence.group, found.token_ids
        num_tokens = sequence.num_tokens + 1
        if (
            (item is not sequence.next_step and not _is_decode(sequence, item))
            or sequence.status is not _RUNNING
            or num_tokens >= sequence.limit
            or tokens[0] in group.stop_token_ids
            or sequence.index not in group.unfinished
            or found.draft_token_ids
            or found.prompt_logprobs is not None
            or (group.grammar is not None and (sequence.matcher is None or group.task.eos_token_id is None))
        ):
            return False
        sequence.output_token_ids.append(tokens[0])
        sequence.num_tokens = num_tokens
        sequence.num_computed_tokens = num_tokens - 1
        if num_tokens > sequence.table.next_commit:
            self._kv.commit(sequence.table, num_tokens - 1)
        if not sequence.num_in_flight:
            sequence.num_expected = num_tokens
            sequence.num_scheduled = num_tokens - 1
        sequence.proposes = False
        sequence.num_drafts = 0
        if sequence.matcher is not None:
            if self.num_guided >= MANY_GUIDED:  # what it takes is done with the masks, aside
                forced = sequence.matcher.owe(tokens[0])
            else:
                sequence.matcher.take(tokens)
                forced = self.config.drafts_forced and sequence.matcher.forced()
            if forced:
                sequence.draft_token_ids, sequence.forces = forced, True
                self._settle(sequence, len(forced))
        num_cached = group.num_cached_tokens or 0
        outputs.append(SequenceOutput(group.request_id, sequence.index, tokens, found.logprobs, num_cached))
        return True

    def _draw(self, sequence: Sequence, item: ScheduledSequence, found: SequenceResult) -> Outputs:
        """A sequence goes on by the tokens drawn for it, or ends with one of them."""
        tokens, logprobs, group = found.token_ids, found.logprobs, sequence.group
        if item.num_drafts and not item.draft_token_ids:
            self.drafts.count(item.num_drafts, len(tokens) - 1)
        num_used, reason, stop_reason = self._extend(sequence, tokens)
        # After the tokens: a block that accepted drafts have filled is named by them.
        self._advance(sequence, item.num_new_tokens - item.num_drafts + len(tokens) - 1)
        outputs: Outputs = []
        if sequence.index in group.unfinished:
            tokens, logprobs = tokens[:num_used], logprobs and logprobs[:num_used]
            outputs = [group.output(sequence.index, tokens, logprobs, found.prompt_logprobs, (reason, stop_reason))]
            if found.pooled is not None:
                outputs = [structs.replace(outputs[0], pooled=found.pooled, finish_reason="stop")]
        if reason is None:
            drafts = list(found.draft_token_ids)
            if drafts:
                sequence.kept_drafts = sequence.num_tokens, drafts
                if drafts[-1] < 0:
                    drafts = drafts[:-1]
            self._settle(sequence, len(drafts) if group.grammar is None else self._guided_drafts(sequence, drafts))
        else:
            group.unfinished.discard(sequence.index)
            self._drop(sequence)
        return outputs

    def _branch(self, parent: Sequence, sampling: Sampling, found: SequenceResult) -> Outputs:
        """Several sequences may go on from one, each with an output of its own; of beams, all at once or none yet."""
        group, prompt_logprobs, outputs = parent.group, found.prompt_logprobs, []
        if (branches := group.continuation.advance(parent.index, len(parent.output_token_ids), found)) is None:
            self._planner.sit_out(parent)
            return []
        if not group.continuation.tells_tokens:
            return self._choose(group, branches)
        own = next((branch for branch in branches if branch.index == parent.index), None)
        for branch in branches:
            if branch is not own and branch.index in group.unfinished:
                child, end = self._begin(parent, branch)
                outputs.append(group.output(child.index, child.output_token_ids.copy(), branch.logprobs, None, end))
        if own is not None:
            _, reason, stop_reason = self._extend(parent, [own.token_id])
            if sampling is _RANK and parent.status is _RUNNING:
                parent.chosen_token_id = own.token_id
            if parent.index in group.unfinished:
                end = reason, stop_reason
                outputs.insert(0, group.output(parent.index, [own.token_id], own.logprobs, prompt_logprobs, end))
            if reason is not None:
                group.unfinished.discard(parent.index)
        if own is None or not group.needs(parent.index):
            self._drop(parent)
        else:
            parent.ask_continuation()
            self._settle(parent, 0)
        return outputs

    def _choose(self, group: SequenceGroup, branches: list[Branch]) -> Outputs:
        """All beams of a request go on, or its outputs are complete.

        Those that nothing goes on from end first, so that others can have their places.
        """
        if not branches:
            return self._tell_endings(group)
        children: dict[int, list[Branch]] = {}
        for branch in branches:
            children.setdefault(branch.parent, []).append(branch)
        for beam in list(group.sequences.values()):
            beam.sits_out = False
            if beam.index not in children:
                self._drop(beam)
        for parent in [group.sequences[index] for index in children]:
            own = -1
            for branch in children[parent.index]:
                if branch.index == parent.index:
                    own = branch.token_id
                else:
                    self._begin(parent, branch)
            assert own >= 0, "a beam that others go on from has no place of its own"
            self._extend(parent, [own])
            if parent.status is _RUNNING:
                parent.chosen_token_id = own
            parent.ask_continuation()
            self._settle(parent, 0)
        if self._planner.watches_service:
            self._planner.note_served(group, len(branches))
        return []

    def _tell_endings(self, group: SequenceGroup) -> Outputs:
        """A request is over: its outputs, whole; an error in place of those that there are not."""
        outputs: Outputs = []
        endings = group.continuation.endings()
        for index, (logprobs, end) in enumerate(endings):
            if index in group.unfinished:
                group.unfinished.remove(index)
                tokens = [entry.token_ids[0] for entry in logprobs]
                outputs.append(group.output(index, tokens, logprobs, None, end))
        message = (
            f"n = {group.task.num_sequences} outputs were asked for, and the beam search found {len(endings)}, as the "
            "request's parameters leave too few tokens to choose from; lower n, or allow more tokens."
        )
        return outputs + self.end_request(group, "error", Failure(FailureKind.BAD_REQUEST, message))

    def _begin(self, parent: Sequence, branch: Branch) -> tuple[Sequence, tuple[str | None, int | None]]:
        """A new sequence goes on from another's computed tokens; returns it, and its finish_reason and stop_reason.

        It shares the parent's blocks where there is a place to run in; otherwise it waits without any.
        """
        group, planner = parent.group, self._planner
        child = self.make_sequence(group, branch.index, parent.output_token_ids.copy())
        child.matcher = parent.matcher and parent.matcher.copy()
        _, reason, stop_reason = self._extend(child, [branch.token_id])
        if reason is not None:
            group.unfinished.discard(child.index)
            self._drop(child)
        elif parent.status is _RUNNING and len(planner.running) < planner.max_running:
            planner.start_fork(child, parent, branch.token_id)
        child.settle()
        return child, (reason, stop_reason)

    def _extend(self, sequence: Sequence, token_ids: list[int]) -> tuple[int, str | None, int | None]:
        """Append tokens up to one that ends the sequence.

        Returns:
            How many were appended, and why the sequence ends: finish_reason and stop_reason.
        """
        group, outputs = sequence.group, sequence.output_token_ids
        num_used = 0
        for token_id in token_ids:
            outputs.append(token_id)
            num_used += 1
            sequence.num_tokens += 1
            if token_id in group.stop_token_ids and len(outputs) >= group.min_tokens:
                return num_used, "stop", token_id if token_id != group.task.eos_token_id else None
            if sequence.num_tokens >= group.limit:
                return num_used, "length", None
        if sequence.matcher is not None:
            sequence.matcher.take(token_ids)
            if group.task.eos_token_id is None and sequence.matcher.is_stopped:
                return num_used, "stop", None  # nothing else may follow, and the model has no token to say so
        return num_used, None, None

    def _guided_drafts(self, sequence: Sequence, proposed: list[int]) -> int:
        """What a sequence with a grammar is to verify next: tokens that are forced, else allowed drafts. How many."""
        matcher = sequence.matcher
        assert matcher is not None, "a token was drawn without a mask"
        forced = matcher.forced() if self.config.drafts_forced else []
        if self.config.draft_tree is not None:  # a mask is of a chain
            proposed = []
        sequence.forces = bool(forced)
        sequence.draft_token_ids = forced or (proposed and proposed[: matcher.num_allowed(proposed)])
        return len(sequence.draft_token_ids)

    def _advance(self, sequence: Sequence, num_new_tokens: int) -> None:
        """So many more tokens have keys and values, unless the sequence has been preempted meanwhile."""
        if sequence.status is _RUNNING:
            # Where drafts were accepted beyond a token that ends the sequence, they are none of its tokens.
            sequence.num_computed_tokens = min(sequence.num_computed_tokens + num_new_tokens, sequence.num_tokens)
            self._kv.commit(sequence.table, sequence.num_computed_tokens)

    def _settle(self, sequence: Sequence, num_drafts: int) -> None:
        """A result of a sequence that goes on is taken in; unless more are to come, no more is expected than is known.

        Drafts are good for a step that is planned with them; one planned before them has made them void.
        """
        sequence.proposes = num_drafts > 0
        if sequence.num_in_flight:
            return
        sequence.settle()
        if sequence.status is _RUNNING:
            sequence.num_drafts = num_drafts
        elif sequence.status is _PREPARING:
            self._planner.make_ready(sequence)

    # Ends.

    def end_request(self, group: SequenceGroup, reason: str, failure: Failure | None = None) -> Outputs:
        """End all unfinished sequences of a request, each with an output."""
        outputs = [group.output(index, [], end=(reason, None)) for index in sorted(group.unfinished)]
        if failure is not None:
            outputs = [structs.replace(output, failure=failure) for output in outputs]
        group.unfinished.clear()
        self.drop_unneeded(group)
        return outputs

    def drop_unneeded(self, group: SequenceGroup) -> None:
        """Forget the sequences of a request that have ended and carry no others."""
        for sequence in [s for s in group.sequences.values() if not group.needs(s.index)]:
            self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        """Forget a sequence, and its request with the last one."""
        self._planner.drop(sequence)
        group = sequence.group
        del group.sequences[sequence.index]
        if not group.sequences:
            assert not group.unfinished, "sequences of a request were left without a beginning"
            del self.groups[group.request_id]
            self.num_guided -= group.task.has_grammar
            self._planner.policy.on_ended(group.request)
            if group.announced:
                self._planner.ended[group.request_id] = None


def _is_decode(sequence: Sequence, item: ScheduledSequence) -> bool:
    """Whether one token is computed and one drawn, as `Sequence.next_step` says it where no block was added."""
    return item.num_new_tokens == 1 and sequence.draws_one and item.sampling is _DRAW
