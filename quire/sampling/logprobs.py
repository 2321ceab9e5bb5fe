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
    maximum = float(logits.max())
    if not math.isfinite(maximum):  # nothing can be likely in a row of NaN or of masked tokens
        logits, maximum = np.full_like(logits, -math.inf), 0.0
    total = int(weigh(logits, maximum).sum())
    normaliser = maximum + (math.log(total) - WEIGHT_BITS * math.log(2) if total else 0.0)
    top = _most_likely(logits, len(logits) if k == -1 else min(k, len(logits)))
    values = logits[top]
    top_ids: list[int] = top.tolist()
    top_logprobs: list[float] = _rounded(values, normaliser)
    top_ranks: list[int] = (np.searchsorted(-values, -values) + 1).tolist()
    entries: list[TokenLogprobs] = []
    for token_id in token_ids:
        value = logits[token_id : token_id + 1]
        rank = int(np.count_nonzero(logits > value)) + 1
        entries.append(
            TokenLogprobs([token_id, *top_ids], _rounded(value, normaliser) + top_logprobs, [rank, *top_ranks])
        )
    return entries


def prompt_logprobs(
    logits: Tensor, target_ids: Sequence[int], k: int, target: Target | None = None
) -> list[TokenLogprobs]:
    """Entry r is for `target_ids[r]` under row r of `logits`, [R, V] of any float type; as `row_logprobs`."""
    if native.library() is not None and len(target_ids) == len(logits) > 0 and 0 <= k <= native.MAX_LOGPROBS:
        return native.given_logprobs(target or default_target(), logits.cpu(), target_ids, k)
    rows = zip(logits.cpu(), target_ids, strict=True)
    return [row_logprobs(float32_array(row), [token_id], k)[0] for row, token_id in rows]


def _rounded(values: Floats, normaliser: float) -> list[float]:
    return (values.astype(np.float64) - normaliser).astype(np.float32).tolist()


def _most_likely(logits: Floats, k: int) -> Ids:
    """Exactly k ids: the leading ones, then masked ones by id where those are too few."""
    if k == 0:
        return np.empty(0, np.int64)
    ids = leading_ids(logits, k)
    return ids if len(ids) == k else np.concatenate([ids, np.flatnonzero(logits == -math.inf)[: k - len(ids)]])
