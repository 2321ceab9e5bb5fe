"""The mutable state of requests and their sequences.

Made and changed by the scheduler only; everything that leaves it is a frozen message of `quire.protocol`. A sequence
knows its tokens and its block table, and nothing of queues or of the other requests.
"""

from enum import Enum, auto
from typing import Any

from quire.kvcache.prefix import root_hash
from quire.kvcache.table import BlockTable
from quire.protocol.requests import NewRequest
from quire.protocol.step import NewSequence, PromptLogprobs, Sampling, ScheduledSequence, SequenceOutput, TokenLogprobs
from quire.scheduler.continuation import Continuation
from quire.structured.matcher import Grammar, Matcher


class SequenceStatus(Enum):
    """Where a sequence is; it holds blocks while it is RUNNING only."""

    PREPARING = auto()  # can't run yet, whatever is free: see Sequence.awaits
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class SequenceGroup:
    """A request and the sequences drawn from its prompt.

    Attributes:
        request_id, task: the request's.
        order: how many requests were added before it.
        root: what its sequences' prefixes in the cache begin with.
        lane: the policy's lane that it waits in.
        key: the policy's sort key; smaller runs earlier.
        limit: tokens of a sequence, prompt and output, at which it ends.
        continuation: what the sequences' results mean.
        unfinished: outputs, 0 .. num_sequences - 1, that have not ended yet.
        sequences: the live sequences by index; only the root, index 0, until others come from it.
        announced: whether the workers know the request.
        grammar: of its outputs, where they have one and it is compiled.
        num_cached_tokens: prompt tokens found in the prefix cache at first; None before the first admission.
        num_prompt_logprobs: prompt positions whose logprobs were delivered, the first (which has none) included.
    """

    def __init__(self, request: NewRequest, order: int, continuation: Continuation, max_model_len: int) -> None:
        task = request.task
        self.request, self.order, self.continuation = request, order, continuation
        self.request_id, self.task, self.stop_token_ids = request.request_id, task, task.stop_token_ids
        self.limit = min(len(request.prompt_token_ids) + task.max_tokens, max_model_len)
        # A grammar may allow nothing but an end before; it is drawn only then.
        self.min_tokens = 0 if task.has_grammar else task.params.min_tokens
        self.unfinished = set(range(task.num_sequences))
        self.root = root_hash(request.cache_salt, request.adapter.digest if request.adapter else b"")
        self.lane: str | None = None
        self.key: tuple[Any, ...] = ()
        self.sequences: dict[int, Sequence] = {}
        self.announced = False
        self.grammar: Grammar | None = None
        self.num_cached_tokens: int | None = None
        self.num_prompt_logprobs = 1

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether prompt logprobs were asked for and are still to come, for which the prompt must be computed."""
        num_prompt = len(self.request.prompt_token_ids)
        return self.task.params.prompt_logprobs is not None and self.num_prompt_logprobs < num_prompt

    def output(
        self,
        index: int,
        new_token_ids: list[int],
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
        end: tuple[str | None, int | None] = (None, None),
    ) -> SequenceOutput:
        """What the sequence of this index brings upstairs; `end` is its finish_reason and stop_reason."""
        num_cached = self.num_cached_tokens or 0
        return SequenceOutput(self.request_id, index, new_token_ids, logprobs, num_cached, prompt_logprobs, *end)

    def undelivered(self, part: PromptLogprobs) -> PromptLogprobs | None:
        """What is new of some prompt logprobs: after a preemption they are computed, and come, once more."""
        start = self.num_prompt_logprobs
        assert start >= part.start, "prompt logprobs are missing"
        new = part.entries[start - part.start :]
        self.num_prompt_logprobs += len(new)
        return PromptLogprobs(start, new) if new else None

    def needs(self, index: int) -> bool:
        """Whether the sequence of this index must go on."""
        return index in self.unfinished or self.continuation.carries(index, self.unfinished)


class Sequence:
    """One sequence: its tokens, how many of them have keys and values, and its block table.

    With plans in flight a sequence is ahead of what is known of it: `num_expected` counts the tokens that results
    still to come will bring, `num_scheduled` the positions handed out. Without any, they are `num_tokens` and
    `num_computed_tokens`. A sequence whose next step needs the last one's result expects nothing, and so sits out.

    Attributes:
        sequence_id: unique in the engine's life.
        index: within its request, as its continuation counts.
        key: sort key in its queue; unique. Of one that runs, the seat that the policy gave it; else `own_key`.
        num_tokens: prompt and output tokens.
        num_computed_tokens: tokens whose keys and values are in the blocks; less than num_tokens, or sits_out.
        num_in_flight: plans in flight that schedule it.
        limit: tokens at which it ends, its group's.
        next_step: what a plan says of it when it computes one token and draws one: most of what is ever planned.
        sampling, num_samples: what is done at its last position; draws_one: that is one draw.
        num_drafts: draft tokens that its row has for the next step.
        kept_drafts: the newest drafts that its row had, and the number of tokens that it had then.
        matcher: where it stands in its request's grammar, once tokens were drawn under that.
        draft_token_ids: where there is a grammar, the drafts.
        forces: they are the grammar's own, and not in the row.
        sits_out: its result has come, and what it goes on with depends on siblings' that have not.
        proposes: whether drafts came with its last result, so that the next step waits for the next ones.
        chosen_token_id: its last token, where the row does not have it yet; -1 where it does.
        announced: whether the worker holds a row for it, or will after forks that are planned already.
        awaits: while PREPARING, a reason of `quire.scheduler.reasons.REASONS`.
    """

    def __init__(self, sequence_id: int, group: SequenceGroup, index: int, table: BlockTable) -> None:
        self.sequence_id, self.group, self.index, self.table = sequence_id, group, index, table
        self.key, self.limit = self.own_key, group.limit
        self.next_step = ScheduledSequence(sequence_id, 1, Sampling.DRAW)
        self.output_token_ids = table.output_token_ids
        self.num_tokens = self.num_expected = table.num_tokens
        self.num_computed_tokens = self.num_scheduled = self.num_in_flight = self.num_drafts = 0
        self.matcher: Matcher | None = None
        self.draft_token_ids: list[int] = []
        self.kept_drafts: tuple[int, list[int]] = (0, [])
        self.forces = self.proposes = self.sits_out = self.announced = False
        self.chosen_token_id = -1
        self.status: SequenceStatus = SequenceStatus.WAITING
        self.awaits = ""
        self.ask_continuation()

    @property
    def own_key(self) -> tuple[Any, ...]:
        """Its key wherever it does not run: the request's, and its index."""
        return (*self.group.key, self.index)

    def ask_continuation(self) -> None:
        """Take over what is to be done at the last position."""
        self.sampling, self.num_samples = self.group.continuation.sampling(self.index)
        self.draws_one = self.sampling is Sampling.DRAW and self.num_samples == 1

    @property
    def drafts(self) -> list[int]:
        """The drafts that follow its tokens, [] where there are none, or not any more."""
        num_tokens, token_ids = self.kept_drafts
        return token_ids if num_tokens == self.num_tokens else []

    def settle(self) -> None:
        """No plan in flight has it: nothing is expected but what is known."""
        self.num_expected = self.num_tokens
        self.num_scheduled = self.num_computed_tokens

    def forget_row(self) -> None:
        """The worker's row is gone, and with it what was computed."""
        self.num_computed_tokens = self.num_scheduled = self.num_drafts = 0
        self.chosen_token_id = -1
        self.announced = False

    def announcement(self) -> NewSequence:
        """The sequence as the worker gets to know it."""
        own, request_id = self.sequence_id, self.group.request_id
        index = self.group.task.first_sequence_index + self.index
        outputs, block_ids = self.output_token_ids.copy(), [one.copy() for one in self.table.block_ids]
        return NewSequence(own, request_id, index, outputs, block_ids, self.num_computed_tokens, self.drafts)

    def check_integrity(self, block_size: int, num_plans: int) -> None:
        """Raise AssertionError unless its books agree, with so many plans in flight."""
        where = f"sequence {self.sequence_id}"
        assert self.num_tokens == self.table.num_tokens, f"{where} counts its tokens wrong"
        runs = self.status is SequenceStatus.RUNNING
        own_key = (*self.key[:-2], self.group.order, self.index) if runs else self.own_key
        assert self.key == own_key, f"{where} has another key than its request"
        assert 0 <= self.num_computed_tokens < self.num_tokens + self.sits_out, f"{where} computed more than it has"
        assert 0 <= self.num_in_flight <= num_plans, f"{where} is in more plans than there are"
        if not self.num_in_flight:
            expected = self.num_tokens, self.num_computed_tokens
            assert (self.num_expected, self.num_scheduled) == expected, f"{where} expects too much"
        if runs:
            needed = -(-self.num_computed_tokens // block_size)
            assert all(len(block_ids) >= needed for block_ids in self.table.block_ids), f"{where} lacks blocks"
            return
        assert not any(self.table.block_ids), f"{where} waits with blocks"
        assert self.num_computed_tokens == self.announced == self.num_drafts == 0, f"{where} waits with a row"
        assert self.num_in_flight == 0 or self.awaits == "result", f"{where} waits, but a result is to come"
        assert not self.sits_out or self.awaits == "siblings", f"{where} can't go on, and is in the queue"
