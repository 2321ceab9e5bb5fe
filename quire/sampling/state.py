"""What the sampler knows of one sequence: its parameters as arrays and flags, the counts of its tokens.

The runner makes one per sequence, never per batch row; the tokens themselves are the row's. All facts that don't change
are worked out here, once, so that the sampler's loop only reads flags. Knows no other sequence.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quire.sampling.tokens import SequenceTokens
from quire.sampling_params import SamplingParams, SamplingType

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]


class Mask(NamedTuple):
    """A bitmask: bit t % 32 of word t // 32 is set where token t is allowed. `address` is that of the first word."""

    words: Words
    address: int


def masks_of(table: Words) -> list[Mask]:
    """All rows of [masks, words], which lie one after another."""
    assert table.flags.c_contiguous, "masks with gaps between their words"
    return [Mask(words, words.ctypes.data) for words in table]


def forbid(words: Words, ids: Ids) -> None:
    """Clear the bits of tokens in a bitmask."""
    np.bitwise_and.at(words, ids >> 5, ~(np.uint32(1) << (ids & 31).astype(np.uint32)))


class TokenCounts:
    """The distinct tokens of a sequence and how often its output has each. O(1) per token; arrays double as they fill.

    `ids[:num]` are distinct, prompt's first; `counts[:num]` is 0 for those only in the prompt. Counts what the output
    has gained since the last `update`.
    """

    def __init__(self, tokens: SequenceTokens, with_prompt: bool) -> None:
        self._tokens = tokens
        self._num_counted = tokens.num_prompt
        distinct = list(dict.fromkeys(tokens.prompt())) if with_prompt else []
        self._index = {token_id: i for i, token_id in enumerate(distinct)}
        self.num = len(distinct)
        self._ids: Ids = np.zeros(max(64, 2 * self.num), np.int64)
        self._ids[: self.num] = distinct
        self._counts: Floats = np.zeros(len(self._ids), np.float32)
        self.addresses = (self._ids.ctypes.data, self._counts.ctypes.data)  # for the native sampler

    @property
    def ids(self) -> Ids:
        """Distinct token ids, [num]."""
        return self._ids[: self.num]

    @property
    def counts(self) -> Floats:
        """Occurrences in the output, [num]."""
        return self._counts[: self.num]

    def update(self) -> None:
        """Count the tokens that the sequence has gained."""
        tokens = self._tokens
        for token_id in tokens.ids[self._num_counted : tokens.num].tolist():
            index = self._index.setdefault(token_id, self.num)
            if index == self.num:
                self._add(token_id)
            self._counts[index] += 1
        self._num_counted = tokens.num

    def _add(self, token_id: int) -> None:
        if self.num == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self.addresses = (self._ids.ctypes.data, self._counts.ctypes.data)
        self._ids[self.num] = token_id
        self.num += 1


class SamplingState:
    """One sequence's parameters and tokens, ready for the sampler.

    Args:
        params: the request's; `top_k` 0 or -1, `top_p` 1 and `min_p` 0 mean off.
        tokens: the sequence's, in its row; what is appended there counts from then on.
        seed: 64-bit key of the request's random numbers.
        sequence_index: which of the request's sequences this is; part of the key.
        vocab_size: width of the logits; ids beyond it in the lists below are left out.
        stop_token_ids: tokens that may not come before `min_tokens` tokens have.
        bad_words_token_ids: token sequences that must not be completed within the output.
    """

    def __init__(
        self,
        params: SamplingParams,
        tokens: SequenceTokens,
        *,
        seed: int,
        sequence_index: int,
        vocab_size: int,
        stop_token_ids: Iterable[int] = (),
        bad_words_token_ids: Iterable[Sequence[int]] = (),
    ) -> None:
        self.params, self.tokens, self.seed = params, tokens, seed
        self.sequence_index, self.vocab_size = sequence_index, vocab_size
        self.greedy = params.sampling_type is SamplingType.GREEDY
        top_k = params.top_k if 0 < params.top_k < vocab_size else vocab_size
        self.choice = params.temperature, top_k, params.top_p, params.min_p  # as `quire.sampling.select` takes them
        self.num_logprobs = params.logprobs  # None: not asked for; -1: the vocabulary

        def ids(values: Iterable[int] | None) -> Ids | None:
            kept = sorted({value for value in values or () if 0 <= value < vocab_size})
            return np.array(kept, np.int64) if kept else None

        bad_words = [list(word) for word in bad_words_token_ids if word and 0 <= word[-1] < vocab_size]
        self.bad_token_ids = ids(word[0] for word in bad_words if len(word) == 1)
        self.bad_sequences = [word for word in bad_words if len(word) > 1]
        self._longest_prefix = max((len(word) - 1 for word in self.bad_sequences), default=0)
        self.allowed_token_ids = ids(params.allowed_token_ids)
        self.stop_token_ids = ids(stop_token_ids)
        self.min_tokens = params.min_tokens if self.stop_token_ids is not None else 0
        biases = {token_id: bias for token_id, bias in (params.logit_bias or {}).items() if token_id < vocab_size}
        self.bias_ids: Ids | None = np.array(list(biases), np.int64) if biases else None
        self.biases: Floats = np.array(list(biases.values()), np.float32)
        self.logits_processors = [(f, _wants_prompt(f)) for f in params.logits_processors or ()]
        self.counts: TokenCounts | None = None  # where there are penalties
        repeats = params.repetition_penalty != 1.0
        if repeats or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            self.counts = TokenCounts(tokens, with_prompt=repeats)  # the prompt counts for this penalty only
        by_ids = not (self.allowed_token_ids is self.bad_token_ids is self.bias_ids is None)
        self._always_processes = bool(self.counts or self.logits_processors or self.bad_sequences) or by_ids
        # The native sampler's copy of all this (native.py): for good, or to be brought up to date at every step.
        self.record: bytes | None = None
        self.live_record: bytearray | None = None
        self.completing: Ids | None = None  # what that points to

    @property
    def processes(self) -> bool:
        """Whether the logits need anything done before the choice (min_tokens ends; the rest lasts)."""
        return self._always_processes or self.tokens.position < self.min_tokens

    def bars_stops(self, mask: Mask | None, position: int | None = None) -> bool:
        """Whether tokens that stop may not come yet: before min_tokens, unless a grammar allows nothing else.

        `position` is that of the token to be drawn, the sequence's next where it is None.
        """
        if self.stop_token_ids is None or (self.tokens.position if position is None else position) >= self.min_tokens:
            return False
        if mask is None:
            return True
        others = mask.words.copy()
        forbid(others, self.stop_token_ids)
        return bool(others.any())

    def completing_ids(self) -> list[int]:
        """Tokens that would complete a bad word of several tokens."""
        tail = self.tokens.tail(self._longest_prefix)
        return [last for *prefix, last in self.bad_sequences if tail[-len(prefix) :] == prefix]


def _wants_prompt(processor: Callable[..., Any]) -> bool:
    """Whether a logits processor takes (prompt_ids, output_ids, logits): three positional arguments without default."""
    try:
        parameters = inspect.signature(processor).parameters.values()
    except (TypeError, ValueError):  # a builtin without signature
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.default is p.empty and p.kind in positional for p in parameters) >= 3
