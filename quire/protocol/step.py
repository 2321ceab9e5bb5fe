"""The messages between rooms: requests go down, plans go down, results come up.

The engine makes `NewRequest`, the scheduler `StepPlan`, the executor `StepResult`, and the scheduler turns that into
`SequenceOutput`. All are msgspec structs without tensors, so that they cross a process border unchanged. New
sequences travel whole, old ones as a diff.
"""

import msgspec

from quire.sampling_params import SamplingParams

# The error of a sequence whose own parameters are to blame.
NO_TOKEN_LEFT = "no token is left to choose: the request's parameters (or a logits processor) mask them all."


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: the token itself first, then the top-k, most likely first.

    The token appears again among the top-k when it is one of them; three lists of equal length.
    """

    token_ids: list[int]
    logprobs: list[float]  # natural log, of the raw distribution
    ranks: list[int]  # 1 = most likely


class NewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request on its way to the scheduler."""

    request_id: str
    prompt_token_ids: list[int]  # never empty
    sampling_params: SamplingParams
    max_tokens: int  # resolved: output tokens allowed, so that prompt + output <= max_model_len
    stop_token_ids: frozenset[int]  # end-of-sequence ids (unless ignore_eos) and the user's stop_token_ids
    seed: int  # resolved: 64-bit key of the request's random numbers
    bad_words_token_ids: list[list[int]] = []  # token sequences that must never be completed
    first_sequence_index: int = 0  # > 0 when one request is split into several that must draw as its forks would
    arrival_time: float = 0.0  # seconds, any monotonic origin
    priority: int = 0  # lower runs first under the "priority" policy
    cache_salt: str | None = None  # requests share cached prefixes only with the same salt

    @property
    def num_sequences(self) -> int:
        """How many sequences are drawn from the prompt (best_of, or n)."""
        return self.sampling_params.best_of or self.sampling_params.n


class NewSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that the runner does not hold: just admitted, forked, or resumed after preemption."""

    sequence_id: int  # unique in the engine's life; a resumed sequence keeps its id
    request_id: str
    sequence_index: int  # keys the random numbers together with seed and position
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    bad_words_token_ids: list[list[int]]
    block_ids: list[int]  # the whole block table, blocks for this step's tokens included
    num_computed_tokens: int  # tokens whose keys and values are in the blocks already


class ScheduledSequence(msgspec.Struct, frozen=True, array_like=True):
    """What one sequence does in this step: computes positions [computed, computed + num_new_tokens)."""

    sequence_id: int
    num_new_tokens: int  # >= 1
    num_samples: int  # 0 while tokens remain to be caught up; 1; n where a request with n > 1 ends its prompt
    new_block_ids: list[int]  # appended to the row's block table first; empty for a sequence in new_sequences


class BlockCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copy-on-write: before the step, copy block `source` to `destination` in every layer.

    The row of `sequence_id`, where the runner already holds one, then has `destination` at `block_index`.
    """

    sequence_id: int
    block_index: int
    source: int
    destination: int


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Which tokens of which sequences are computed in a step, and in which blocks."""

    step_id: int
    removed_sequence_ids: list[int]  # rows to drop first: finished, aborted or preempted
    new_sequences: list[NewSequence]
    copies: list[BlockCopy]
    scheduled: list[ScheduledSequence]  # order of the batch

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(s.num_new_tokens for s in self.scheduled)


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of prompt tokens [start, start + len(entries)); start >= 1 as the first has none."""

    start: int
    entries: list[TokenLogprobs]


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the executor brings back from a step."""

    step_id: int
    token_ids: list[int]  # one per sample, flat, in the order of plan.scheduled; -1 where the sequence failed
    logprobs: dict[int, list[TokenLogprobs]] = {}  # sequence_id -> one entry per sample, where asked for
    prompt_logprobs: dict[int, PromptLogprobs] = {}  # sequence_id -> this step's part, where asked for
    errors: dict[int, str] = {}  # sequence_id -> why it failed (its own logits processor raised, say)


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True):
    """News of one sequence after a step, for the output processor."""

    request_id: str
    sequence_index: int  # 0 .. num_sequences - 1, counted from the request's first
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per new token
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | None = None  # the user's stop token id that ended it; None for end-of-sequence
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    error: str | None = None
