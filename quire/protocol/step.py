"""A step's messages: the plan goes down, the result comes up.

The scheduler makes `StepPlan`, the executor `StepResult`, and the scheduler turns that into `SequenceOutput`. New
sequences travel by their tokens, old ones as a diff, forks as a reference to their parent. Lists by KV group have one
entry a group, in the order of `CacheLayout.groups`. All are msgspec structs without tensors. Those that come by the
thousand a step are hidden from the garbage collector (`gc=False`), as they can be part of no cycle.
"""

from collections.abc import Sequence
from enum import IntEnum

import msgspec

from quire.protocol.requests import NewRequest


class Sampling(IntEnum):
    """What happens at a sequence's last computed position."""

    NONE = 0  # nothing: tokens remain to be caught up
    DRAW = 1  # a token is drawn and appended to the row
    RANK = 2  # the best candidates come back and nothing is appended: the scheduler chooses (beams)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one position: the token itself first, then the top-k, most likely first.

    The token appears again among the top-k when it is one of them; three lists of equal length.
    """

    token_ids: list[int]
    logprobs: list[float]  # natural log, of the raw distribution
    ranks: list[int]  # 1 = most likely


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of prompt tokens [start, start + len(entries)); start >= 1 as the first has none."""

    start: int
    entries: list[TokenLogprobs]


class FailureKind(IntEnum):
    """Whose fault a failure is."""

    BAD_REQUEST = 0  # the request's own parameters are to blame
    INTERNAL = 1  # ours


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why one sequence could not go on; its request ends with it, others don't notice."""

    kind: FailureKind
    message: str  # without paths, addresses or traces
    param: str | None = None  # the parameter to blame, where it is one


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that the worker holds no row for: just admitted, or resumed after preemption."""

    sequence_id: int  # unique in the engine's life; a resumed sequence keeps its id
    request_id: str  # of a NewRequest in this plan or an earlier one
    sequence_index: int  # keys the random numbers together with seed and position
    output_token_ids: list[int]
    block_ids: list[list[int]]  # by KV group: the whole block table, blocks for this step's tokens included
    num_computed_tokens: int  # tokens whose keys and values are in the blocks already
    draft_token_ids: list[int] = []  # of its next step, of which its preemption has bereft it


class Fork(msgspec.Struct, frozen=True, array_like=True):
    """A new row that begins as a copy of another: its first `num_tokens` tokens, all computed, and their blocks.

    Carried out before rows are removed and before any token, block or edit of this plan reaches the parent. The
    child's block table is the parent's, as far as it holds those tokens, in every group.
    """

    sequence_id: int
    parent_id: int
    sequence_index: int
    num_tokens: int
    token_id: int  # the child's own next token, appended after them


class ScheduledSequence(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one sequence does in this step: computes positions [computed, computed + num_new_tokens)."""

    sequence_id: int
    num_new_tokens: int  # >= 1, drafts included
    sampling: Sampling = Sampling.NONE
    num_samples: int = 1  # draws at the last position: > 1 where a request with n > 1 ends its prompt
    new_block_ids: list[list[int]] = []  # by KV group, appended to the row's tables first; [] for none in any group
    edits: list[tuple[int, int, int]] = []  # (group, block index, block): the row's table then has `block` there
    num_drafts: int = 0  # the last so many of the new tokens are drafts, sampled one by one while they agree
    draft_token_ids: list[int] = []  # them, where the scheduler drew them; [] where the row has them
    chosen_token_id: int = -1  # appended to the row before anything is computed, after a RANK; -1: none


class Moves(msgspec.Struct, frozen=True, array_like=True):
    """Whole blocks moved before anything is computed, as (group, source, destination), in this order.

    Every source of a list is read before any destination of it is written. What is to be saved is read before all;
    what is to be fetched is there when a result says so, and its host block is nobody else's until then.
    """

    out: list[tuple[int, int, int]] = []  # from the device's blocks to the host's
    copies: list[tuple[int, int, int]] = []  # within the device (copy on write)
    in_: list[tuple[int, int, int]] = []  # from the host's to the device's
    save: list[tuple[int, int, bytes]] = []  # (group, device block, name) to be written to the disk
    fetch: list[tuple[int, int, bytes]] = []  # (group, host block, name) to be read from it


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Which tokens of which sequences are computed in a step, and in which blocks.

    Order of work: new requests, forks, removed rows, new sequences, moves, then edits, new blocks and chosen tokens of
    the scheduled, then the computation, then ended requests are forgotten.
    """

    step_id: int
    removed_sequence_ids: list[int]  # rows to drop: finished, aborted or preempted
    ended_request_ids: list[str]  # requests of which no sequence will come again
    new_requests: list[NewRequest]
    new_sequences: list[NewSequence]
    forks: list[Fork]
    moves: Moves
    scheduled: list[ScheduledSequence]  # order of the batch

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(s.num_new_tokens for s in self.scheduled)


class SequenceResult(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What became of one scheduled sequence. Everything is empty where nothing was sampled."""

    # DRAW: the accepted drafts and the token after them (1 .. num_drafts + 1), or `num_samples` draws of one position.
    token_ids: list[int] = []
    # One per token, where asked for. RANK: of the best candidate, for the likeliest that follow it.
    logprobs: list[TokenLogprobs] | None = None
    # For the next step; the row has them. A last -1: the token after them is drawn. No list of its own where none are,
    # which the garbage collector would count in each result.
    draft_token_ids: Sequence[int] = ()
    candidates: TokenLogprobs | None = None  # RANK: the best tokens after processing, best first
    pooled: list[float] | None = None  # of a PoolingTask whose prompt is computed: its last token's hidden state [H]
    prompt_logprobs: PromptLogprobs | None = None  # this step's part, where asked for
    failure: Failure | None = None  # then all else is to be ignored


class DiskNews(msgspec.Struct, frozen=True):
    """What became of blocks on the disk since the last result."""

    fetched: list[tuple[int, int, bool]] = []  # (group, host block, whether it was read), in the order of the asking
    num_written: int = 0  # blocks
    num_damaged: int = 0  # files that are not what they should be, never read into an answer
    num_failed: int = 0  # blocks that could not be written, or were too many at once
    num_removed: int = 0  # files removed to stay within the limit


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the executor brings back from a step."""

    step_id: int
    results: list[SequenceResult]  # one per plan.scheduled, in its order
    disk: DiskNews | None = None  # where there is news


class SampleGuide(msgspec.Struct, frozen=True, kw_only=True):
    """Which tokens a step may draw: made while the device computes, needed when it samples.

    `masks` holds one bitmask per entry of `rows`, little-endian uint32 words, bit t set where token t is allowed;
    `rows` says for which scheduled sequence (its place in the plan) and which sampled position of it. The memory
    is writable, and used anew for the next step: who needs it longer, or elsewhere, copies it.
    """

    step_id: int
    masks: memoryview
    rows: list[tuple[int, int]]


class SequenceOutput(msgspec.Struct, frozen=True, gc=False):
    """News of one sequence after a step, for the output processor."""

    request_id: str
    sequence_index: int  # 0 .. num_sequences - 1, counted from the request's first
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per new token
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | None = None  # the token id that ended it, unless it is the model's first end-of-sequence id
    failure: Failure | None = None
    pooled: list[float] | None = None  # as in SequenceResult
