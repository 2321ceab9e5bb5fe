"""From logits to tokens: one call per step for all sequences that draw in it.

The order for each row is vLLM's: raw logprobs (before anything), processing.py, temperature, min_p, top-k, top-p, draw;
greedy rows take the largest processed logit, the lowest id among equals. A row's outcome has the same bits alone or in
any batch, at any row, and from the compiled sampler (native.py, where there is one) or numpy. A row that can't be
sampled is reported in `failures`; the others go on. Called by the runner.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from quire.ops.native.library import Target, default_target
from quire.protocol.step import Failure, FailureKind, TokenLogprobs
from quire.sampling import native
from quire.sampling.logprobs import listed_logprobs, row_logprobs
from quire.sampling.processing import Mask, RowError, float32_array, process_logits
from quire.sampling.random import random_bits
from quire.sampling.select import Weights, candidates, draw, kept_weights, leading_ids
from quire.sampling.state import Floats, SamplingState

logger = logging.getLogger(__name__)


@dataclass
class SamplerOutput:
    """What was drawn, by sequence."""

    token_ids: list[list[int]]  # one per sample; [] where the sequence failed
    logprobs: list[list[TokenLogprobs] | None]  # one per sample; None where not asked for
    failures: dict[int, Failure] = field(default_factory=dict)  # index of the sequence -> why there is no token


@dataclass(slots=True)
class Draws:
    """What is to be drawn from [N, V] logits: sequence i draws `num_samples[i]` tokens from row `rows[i]`.

    Where that is more than one, sample j is drawn as sequence `sequence_index` + j would. `masks`, where there are any,
    has a grammar's bitmask or None for each sequence.
    """

    states: Sequence[SamplingState]
    num_samples: Sequence[int]
    rows: Sequence[int]
    masks: Sequence[Mask | None] | None = None

    def some(self, indices: Sequence[int]) -> "Draws":
        """Those of some sequences."""
        states, num_samples, rows = self.states, self.num_samples, self.rows
        masks = None if self.masks is None else [self.masks[i] for i in indices]
        chosen = [states[i] for i in indices], [num_samples[i] for i in indices], [rows[i] for i in indices]
        return Draws(*chosen, masks)

    def special(self) -> list[int]:
        """Sequences of which something is asked that the compiled sampler can't do."""
        return [i for i, state in enumerate(self.states) if state.logits_processors]


def sample(logits: Tensor, draws: Draws, target: Target | None = None) -> SamplerOutput:
    """Choose the next token or tokens of each sequence from `logits`, [N, V] of any float type. Appends nothing.

    Where that breaks, each sequence is sampled by itself, so that only one that breaks by itself fails. `target` says
    with which kernels and threads, `default_target` where it is None; the result is the same on any.
    """
    try:
        return _sample(logits, draws, target)
    except Exception as error:
        logger.exception("sampling %d sequences broke", len(draws.states))
        if len(draws.states) == 1:
            failure = Failure(FailureKind.INTERNAL, f"{type(error).__name__} while its token was chosen")
            return SamplerOutput([[]], [None], {0: failure})
    output = SamplerOutput([], [])
    for i in range(len(draws.states)):
        one = sample(logits, draws.some([i]), target)
        output.token_ids += one.token_ids
        output.logprobs += one.logprobs
        output.failures.update((i, failure) for failure in one.failures.values())
    return output


def row_weights(logits: Tensor, state: SamplingState, mask: Mask | None = None) -> Weights:
    """The weights by which a sequence that is not greedy would draw from its row, int64 [V]; 0 for what it can't.

    Raises:
        RowError: it can't be sampled.
    """
    processed = _processed(float32_array(logits), state, mask)
    maximum = _largest(processed)[1]
    return kept_weights(processed, maximum, state.temperature, state.top_k, state.top_p, state.min_p)


def rank(logits: Tensor, draws: Draws, target: Target | None = None) -> list[TokenLogprobs | Failure]:
    """Each sequence's `num_samples` best tokens of its row after processing, best first; fewer if more are masked.

    Log-probabilities and ranks are those of the raw row, as everywhere.
    """
    logits = logits.cpu()
    masks = draws.masks or [None] * len(draws.states)
    plain = [i for i, state in enumerate(draws.states) if not state.processes and masks[i] is None]
    found = _rank_natively(logits, draws.some(plain), target) if plain else []
    ranked: dict[int, TokenLogprobs | Failure] = {i: one for i, one in zip(plain, found, strict=False) if one}
    return [
        ranked[i] if i in ranked else _rank_one(logits[draws.rows[i]], state, draws.num_samples[i], masks[i])
        for i, state in enumerate(draws.states)
    ]


def _rank_natively(logits: Tensor, draws: Draws, target: Target | None) -> list[TokenLogprobs | None]:
    """Of rows that nothing is done to, all at once; None for those that can't be sampled, [] if there is no library."""
    num = max(draws.num_samples)
    if native.library() is None or num > native.MAX_LOGPROBS:
        return []
    rows = list(draws.rows)
    if rows != list(range(len(logits))):
        logits = torch.from_numpy(float32_array(logits)[rows])
    ranked: list[TokenLogprobs | None] = []
    entries = native.given_logprobs(target or default_target(), logits, [0] * len(rows), num)
    for entry, wanted in zip(entries, draws.num_samples, strict=True):
        logprobs = entry.logprobs[1 : wanted + 1]
        if math.isfinite(logprobs[-1]):
            ranked.append(TokenLogprobs(entry.token_ids[1 : wanted + 1], logprobs, entry.ranks[1 : wanted + 1]))
        else:
            ranked.append(None)
    return ranked


def _rank_one(logits: Tensor, state: SamplingState, num: int, mask: Mask | None) -> TokenLogprobs | Failure:
    raw = float32_array(logits)
    try:
        processed = _processed(raw, state, mask)
        _largest(processed)
    except RowError as error:
        return error.failure
    return listed_logprobs(raw, leading_ids(processed, num), are_leading=processed is raw)


def _sample(logits: Tensor, draws: Draws, target: Target | None) -> SamplerOutput:
    logits = logits.cpu()
    num = len(draws.states)
    special: Sequence[int] = range(num) if native.library() is None else draws.special()
    if len(special) == num:
        output = SamplerOutput([[] for _ in range(num)], [None] * num)
    elif not special:
        output = _sample_natively(target or default_target(), logits, draws)
    else:
        output = SamplerOutput([[] for _ in range(num)], [None] * num)
        others = sorted(set(range(num)) - set(special))
        some = _sample_natively(target or default_target(), logits, draws.some(others))
        for i, token_ids, logprobs in zip(others, some.token_ids, some.logprobs, strict=True):
            output.token_ids[i], output.logprobs[i] = token_ids, logprobs
        output.failures.update((others[i], failure) for i, failure in some.failures.items())
    if special:
        _sample_in_numpy(logits, draws, special, output)
    asking = [i for i, state in enumerate(draws.states) if state.num_logprobs is not None]
    for i in asking:  # what the compiled sampler has not answered
        if output.logprobs[i] is None and output.token_ids[i]:
            raw = float32_array(logits[draws.rows[i]])
            output.logprobs[i] = row_logprobs(raw, output.token_ids[i], draws.states[i].num_logprobs or 0)
    return output


def _sample_natively(target: Target, logits: Tensor, draws: Draws) -> SamplerOutput:
    token_ids, errors, listed = native.sample_rows(
        target, logits, draws.states, draws.num_samples, draws.rows, draws.masks
    )
    output = SamplerOutput(token_ids, [None] * len(token_ids))
    for i, code in errors.items():
        output.failures[i] = _unusable(native.MAXIMA[code]).failure
    for i, entries in listed.items():
        output.logprobs[i] = entries
    return output


def _sample_in_numpy(logits: Tensor, draws: Draws, indices: Sequence[int], output: SamplerOutput) -> None:
    for i in indices:
        state, num_samples = draws.states[i], draws.num_samples[i]
        try:
            mask = None if draws.masks is None else draws.masks[i]
            processed = _processed(float32_array(logits[draws.rows[i]]), state, mask)
            best, maximum = _largest(processed)
            output.token_ids[i] = (
                [best] * num_samples if state.greedy else _choose(processed, maximum, state, num_samples)
            )
        except RowError as error:
            output.failures[i] = error.failure


def _processed(logits: Floats, state: SamplingState, mask: Mask | None) -> Floats:
    if not state.processes and mask is None:
        return logits
    logits = logits.copy()
    process_logits(logits, state, mask)
    return logits


def _largest(logits: Floats) -> tuple[int, float]:
    """Index and value of the largest logit, lowest index among equals."""
    index = int(logits.argmax())
    value = float(logits[index])
    if not math.isfinite(value):
        raise _unusable(value)
    return index, value


def _choose(logits: Floats, maximum: float, state: SamplingState, num_samples: int) -> list[int]:
    """Tokens drawn from one row, [V]."""
    table, mass = candidates(logits, maximum, state.temperature, state.top_k, state.top_p, state.min_p)
    tokens: list[int] = []
    for index in range(state.sequence_index, state.sequence_index + num_samples):
        bits = partial(random_bits, state.seed, index, state.position)
        tokens.append(draw(table, mass, logits, bits))
    return tokens


def _unusable(maximum: float) -> RowError:
    """Why a row whose largest logit isn't finite can't be sampled."""
    if maximum == -math.inf:
        return RowError("no token is left to choose: allowed_token_ids, bad_words, a grammar or a processor mask all.")
    return RowError(f"the logits are not finite (the largest is {maximum}).", FailureKind.INTERNAL)
