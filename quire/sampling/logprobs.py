"""Log-probabilities of rows of raw logits: of given tokens and of the most likely, with ranks.

Called by the sampler for output tokens and by the runner for prompt tokens; both give the same bits for the same row.
A token's number is computed once the same way wherever it is listed, so that equal means ==.
"""

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from quire.ops.native.library import Target, default_target
from quire.protocol.step import TokenLogprobs
from quire.sampling import native
from quire.sampling.processing import float32_array
from quire.sampling.select import WEIGHT_BITS, leading_ids, weigh
from quire.sampling.state import Floats, Ids


def row_logprobs(logits: Floats, token_ids: Sequence[int], k: int) -> list[TokenLogprobs]:
    """For each of `token_ids`: its log-probability, then those of the k most likely (-1: of all), of one row, [V].

    Values are float32 log-softmax of `logits`. A rank is 1 + the number of tokens with a larger logit.
    """
    logits, normaliser = _normalised(logits)
    top = _listed(logits, normaliser, _most_likely(logits, len(logits) if k == -1 else min(k, len(logits))), True)
    entries: list[TokenLogprobs] = []
    for token_id in token_ids:
        one = _listed(logits, normaliser, np.array([token_id]), False)
        entries.append(TokenLogprobs(one.token_ids + top.token_ids, one.logprobs + top.logprobs, one.ranks + top.ranks))
    return entries


def listed_logprobs(logits: Floats, token_ids: Ids, are_leading: bool = False) -> TokenLogprobs:
    """Of exactly `token_ids`, in their order, under one row, [V]; values and ranks as `row_logprobs`.

    `are_leading`: they are the row's `leading_ids`, so that there is nothing to count.
    """
    return _listed(*_normalised(logits), token_ids, are_leading)


def _listed(logits: Floats, normaliser: float, token_ids: Ids, are_leading: bool) -> TokenLogprobs:
    values = logits[token_ids]
    if are_leading:
        ranks: list[int] = (np.searchsorted(-values, -values) + 1).tolist()
    else:
        ranks = [int(np.count_nonzero(logits > value)) + 1 for value in values]
    logprobs = (values.astype(np.float64) - normaliser).astype(np.float32).tolist()
    return TokenLogprobs(token_ids.tolist(), logprobs, ranks)


def prompt_logprobs(
    logits: Tensor, target_ids: Sequence[int], k: int, target: Target | None = None
) -> list[TokenLogprobs]:
    """Entry r is for `target_ids[r]` under row r of `logits`, [R, V] of any float type; as `row_logprobs`.

    An id beyond the vocabulary, for which there is no logit, has log-probability -inf and comes after all others.
    """
    vocab_size = logits.shape[1]
    known_ids = [token_id if 0 <= token_id < vocab_size else 0 for token_id in target_ids]
    if native.library() is not None and len(target_ids) == len(logits) > 0 and 0 <= k <= native.MAX_LOGPROBS:
        entries = native.given_logprobs(target or default_target(), logits.cpu(), known_ids, k)
    else:
        rows = zip(logits.cpu(), known_ids, strict=True)
        entries = [row_logprobs(float32_array(row), [token_id], k)[0] for row, token_id in rows]
    for entry, token_id in zip(entries, target_ids, strict=True):
        if entry.token_ids[0] != token_id:
            entry.token_ids[0], entry.logprobs[0], entry.ranks[0] = token_id, -math.inf, vocab_size + 1
    return entries


def _normalised(logits: Floats) -> tuple[Floats, float]:
    """The row, and what to subtract from it for log-probabilities."""
    maximum = float(logits.max())
    if not math.isfinite(maximum):  # nothing can be likely in a row of NaN or of masked tokens
        return np.full_like(logits, -math.inf), 0.0
    return logits, maximum + (math.log(int(weigh(logits, maximum).sum())) - WEIGHT_BITS * math.log(2))


def _most_likely(logits: Floats, k: int) -> Ids:
    """Exactly k ids: the leading ones, then masked ones by id where those are too few."""
    if k == 0:
        return np.empty(0, np.int64)
    ids = leading_ids(logits, k)
    return ids if len(ids) == k else np.concatenate([ids, np.flatnonzero(logits == -math.inf)[: k - len(ids)]])
