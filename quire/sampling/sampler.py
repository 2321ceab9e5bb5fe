"""From logits to tokens: one call per step for all sequences that draw in it.

The order for each row is vLLM's: raw logprobs (before anything), processing.py, temperature, min_p, top-k, top-p, draw;
greedy rows take the largest processed logit, the lowest id among equals. A row's outcome has the same bits alone or in
any batch, at any row, and from the compiled sampler (native.py, where there is one) or numpy. A row that can't be
sampled is reported in `failures`; the others go on. Called by the runner, through `waves`, and by what drafts.
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
from quire.sampling import native, select
from quire.sampling.lanes import Draw
from quire.sampling.logprobs import listed_logprobs, row_logprobs
from quire.sampling.processing import RowError, float32_array, process_logits
from quire.sampling.random import random_bits
from quire.sampling.select import Weights, candidates, kept_weights, leading_ids
from quire.sampling.state import Floats

logger = logging.getLogger(__name__)


@dataclass
class SamplerOutput:
    """What was drawn, by sequence."""

    token_ids: list[list[int]]  # one per sample; [] where the sequence failed
    logprobs: list[list[TokenLogprobs] | None]  # one per sample; None where not asked for
    failures: dict[int, Failure] = field(default_factory=dict)  # index of the sequence -> why there is no token


def sample(logits: Tensor, draws: Sequence[Draw], target: Target | None = None) -> SamplerOutput:
    """Choose what each sequence draws from `logits`, [N, V] of any float type. Appends nothing.

    Where that breaks, each sequence is sampled by itself, so that only one that breaks by itself fails. `target` says
    with which kernels and threads, `default_target` where it is None; the result is the same on any.
    """
    try:
        return _sample(logits, draws, target)
    except Exception as error:
        logger.exception("sampling %d sequences broke", len(draws))
        if len(draws) == 1:
            failure = Failure(FailureKind.INTERNAL, f"{type(error).__name__} while its token was chosen")
            return SamplerOutput([[]], [None], {0: failure})
    output = SamplerOutput([], [])
    for i, draw in enumerate(draws):
        one = sample(logits, [draw], target)
        output.token_ids += one.token_ids
        output.logprobs += one.logprobs
        output.failures.update((i, failure) for failure in one.failures.values())
    return output


def row_weights(logits: Tensor, draw: Draw) -> Weights:
    """The weights by which a sequence that is not greedy would draw from [N, V] logits, int64 [V]; 0 for what it can't.

    Raises:
        RowError: it can't be sampled.
    """
    processed = _processed(float32_array(logits[draw.row]), draw)
    return kept_weights(processed, _largest(processed)[1], *draw.state.choice)


def rank(logits: Tensor, draws: Sequence[Draw], target: Target | None = None) -> list[TokenLogprobs | Failure]:
    """Each sequence's `num_samples` best tokens of its row after processing, best first; fewer if more are masked.

    Log-probabilities and ranks are those of the raw row, as everywhere.
    """
    logits = logits.cpu()
    plain = [i for i, draw in enumerate(draws) if not draw.state.processes and draw.mask is None]
    found = _rank_natively(logits, [draws[i] for i in plain], target) if plain else []
    ranked: dict[int, TokenLogprobs | Failure] = {i: one for i, one in zip(plain, found, strict=False) if one}
    return [ranked[i] if i in ranked else _rank_one(logits, draw) for i, draw in enumerate(draws)]


def _rank_natively(logits: Tensor, draws: Sequence[Draw], target: Target | None) -> list[TokenLogprobs | None]:
    """Of rows that nothing is done to, all at once; None for those that can't be sampled, [] if there is no library."""
    num = max(draw.num_samples for draw in draws)
    if native.library() is None or num > native.MAX_LOGPROBS:
        return []
    rows = [draw.row for draw in draws]
    if rows != list(range(len(logits))):
        logits = torch.from_numpy(float32_array(logits)[rows])
    ranked: list[TokenLogprobs | None] = []
    entries = native.given_logprobs(target or default_target(), logits, [0] * len(rows), num)
    for entry, draw in zip(entries, draws, strict=True):
        kept = slice(1, draw.num_samples + 1)
        found = TokenLogprobs(entry.token_ids[kept], entry.logprobs[kept], entry.ranks[kept])
        ranked.append(found if math.isfinite(found.logprobs[-1]) else None)
    return ranked


def _rank_one(logits: Tensor, draw: Draw) -> TokenLogprobs | Failure:
    raw = float32_array(logits[draw.row])
    try:
        processed = _processed(raw, draw)
        _largest(processed)
    except RowError as error:
        return error.failure
    return listed_logprobs(raw, leading_ids(processed, draw.num_samples), are_leading=processed is raw)


def _sample(logits: Tensor, draws: Sequence[Draw], target: Target | None) -> SamplerOutput:
    logits = logits.cpu()
    output = SamplerOutput([[]] * len(draws), [None] * len(draws))
    in_numpy = native.library() is None  # all of them, or those that the compiled sampler can't do
    special = [i for i, draw in enumerate(draws) if in_numpy or draw.state.logits_processors]
    if not special:
        output.token_ids, errors, output.logprobs = native.sample_rows(target or default_target(), logits, draws)
        output.failures = {i: unusable(native.MAXIMA[error]).failure for i, error in errors.items()}
    elif others := [i for i in range(len(draws)) if i not in special]:
        plain = _sample(logits, [draws[i] for i in others], target)
        for place, i in enumerate(others):
            output.token_ids[i], output.logprobs[i] = plain.token_ids[place], plain.logprobs[place]
        output.failures = {others[place]: failure for place, failure in plain.failures.items()}
    for i in special:
        try:
            output.token_ids[i] = _sample_in_numpy(logits, draws[i])
        except RowError as error:
            output.failures[i] = error.failure
    for i, draw in enumerate(draws):  # what the compiled sampler has not answered
        if (k := draw.state.num_logprobs) is not None and output.logprobs[i] is None and output.token_ids[i]:
            output.logprobs[i] = row_logprobs(float32_array(logits[draw.row]), output.token_ids[i], k)
    return output


def _processed(logits: Floats, draw: Draw) -> Floats:
    if not draw.state.processes and draw.mask is None:
        return logits
    logits = logits.copy()
    process_logits(logits, draw.state, draw.mask)
    return logits


def _largest(logits: Floats) -> tuple[int, float]:
    """Index and value of the largest logit, lowest index among equals."""
    index = int(logits.argmax())
    value = float(logits[index])
    if not math.isfinite(value):
        raise unusable(value)
    return index, value


def _sample_in_numpy(logits: Tensor, what: Draw) -> list[int]:
    """Tokens drawn from one row of [N, V]."""
    state, processed = what.state, _processed(float32_array(logits[what.row]), what)
    best, maximum = _largest(processed)
    if state.greedy:
        return [best] * what.num_samples
    table, mass = candidates(processed, maximum, *state.choice)
    tokens: list[int] = []
    for index in range(state.sequence_index, state.sequence_index + what.num_samples):
        bits = partial(random_bits, state.seed, index, state.tokens.position + what.ahead)
        tokens.append(select.draw(table, mass, processed, bits))
    return tokens


def unusable(maximum: float) -> RowError:
    """Why a row whose largest logit isn't finite can't be sampled."""
    if maximum == -math.inf:
        return RowError("no token is left: allowed_token_ids, bad_words, min_tokens, a grammar or processor mask all.")
    return RowError(f"the logits are not finite (the largest is {maximum}).", FailureKind.INTERNAL)
