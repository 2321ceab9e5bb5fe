"""The sampler on the device: the tokens that quire/sampling/select.py draws from the same logits, bit for bit.

Weights, sums and draws are select.py's, whose docstring says why they come out the same whatever the order of the work.
A launch has jobs, each one row of logits: first the draws, then the raw rows of which log-probabilities are wanted.
Kernels: scan (processing, maxima of parts), select (top-k), sum_parts, pick, and rank, of the latter rows. No product
may be fused with a sum: all are launched with `enable_fp_fusion=False`. Called by quire.sampling.device; knows no
sequence.
"""

# Triton's functions say that they may return tuples, and take what they call constexpr.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton import sampler_jobs as jobs
from quire.ops.triton.sampler_select import rank, select

_BIASES_AT_ONCE = tl.constexpr(256)
_A11, _A9, _A7, _A5, _A3, _A1 = (tl.constexpr(float(np.float32(2 / math.log(2) / n))) for n in (11, 9, 7, 5, 3, 1))
_SMALLEST = tl.constexpr(2.0**-32)


@triton.jit
def _processed(x, ids, inside, table, record, counts, vocab):
    mask = tl.load(record + jobs.MASK)
    if mask >= 0:
        words = tl.load(table + mask + ids // 64, mask=inside, other=0)
        x = tl.where(((words >> (ids % 64)) & 1) != 0, x, -jobs.INFINITY)
    num = tl.load(record + jobs.NUM_BIASES).to(tl.int32)
    if num > 0:
        biases = table + tl.load(record + jobs.BIASES)
        first, start, end = tl.min(tl.min(ids, 1), 0), 0, 0  # of those biased within the tile
        for at in range(0, num, _BIASES_AT_ONCE):
            places = at + tl.arange(0, _BIASES_AT_ONCE)
            biased = tl.load(biases + places, mask=places < num, other=jobs.LAST)
            start += tl.sum((biased < first).to(tl.int32), 0)
            end += tl.sum((biased < first + jobs.TILE * jobs.PART).to(tl.int32), 0)
        for at in range(start, end):
            x = tl.where(ids == tl.load(biases + at), x + jobs.real(biases + num + at).to(tl.float32), x)
    slot = tl.load(record + jobs.COUNTS)
    if slot >= 0:
        seen = tl.load(counts + slot * vocab + ids, mask=inside, other=0)
        count = (seen >> 1).to(tl.float32)  # in the output; the last bit: in the prompt
        repetition = jobs.real(record + jobs.REPETITION).to(tl.float32)
        y = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
        y = y - jobs.real(record + jobs.FREQUENCY).to(tl.float32) * count
        y = tl.where(count > 0, y - jobs.real(record + jobs.PRESENCE).to(tl.float32), y)
        x = tl.where(seen != 0, y, x)
    return x


@triton.jit
def _scan(table, logits, stride, processed, counts, maxima, cut_logits, cut_ids, vocab, num_parts):
    job, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    record = table + job * jobs.NUM_FIELDS
    parts = tile * jobs.TILE + tl.arange(0, jobs.TILE)
    ids = parts[:, None] * jobs.PART + tl.arange(0, jobs.PART)[None, :]
    inside = ids < vocab
    x = tl.load(logits + tl.load(record + jobs.SOURCE) * stride + ids, mask=inside, other=-jobs.INFINITY).to(tl.float32)
    slot = tl.load(record + jobs.PROCESSED)
    if slot >= 0:
        x = _processed(x, ids, inside, table, record, counts, vocab)
        tl.store(processed + slot * vocab + ids, x, mask=inside)
    is_nan = tl.max((x != x).to(tl.int32), 1)
    most = tl.where(is_nan > 0, float("nan"), tl.max(tl.where(x == x, x, -jobs.INFINITY), 1))
    tl.store(maxima + job * num_parts + parts, most, mask=parts < num_parts)
    if tile == 0:  # nothing is cut, unless `select` cuts
        tl.store(cut_logits + job, -jobs.INFINITY)
        tl.store(cut_ids + job, vocab)


@triton.jit
def _bits(record, attempt):
    """64 random bits for an attempt at the job's token, by two uint32: low, high."""
    sequence = tl.load(record + jobs.SEQUENCE)
    seed = tl.load(record + jobs.SEED)
    low, high, _, _ = tl.philox_impl(
        tl.load(record + jobs.POSITION).to(tl.uint32), attempt.to(tl.uint32), sequence.to(tl.uint32),
        (sequence >> 32).to(tl.uint32), seed.to(tl.uint32), (seed >> 32).to(tl.uint32),
    )  # fmt: skip
    return low, high


@triton.jit
def _mix(words):
    words = (words ^ (words >> 16)) * 0x7FEB352D
    words = (words ^ (words >> 15)) * 0x846CA68B
    return words ^ (words >> 16)


@triton.jit
def _times(numbers, low, high, weights):
    """When each of `numbers`, uint32, is in the goal: a time of its own by its weight."""
    words = _mix(_mix(numbers * 0x9E3779B9 + low) + high)
    u = ((words >> 1).to(tl.float32) + 0.5) * _SMALLEST
    z = tl.div_rn(u, 2.0 - u)
    square = z * z
    times = square * _A11 + _A9
    times = times * square + _A7
    times = times * square + _A5
    times = times * square + _A3
    times = times * square + _A1
    times = times * z
    coins = ((_mix(words + 0x9E3779B9) >> 8) | 1).to(tl.float32)
    times = times + (150 - (coins.to(tl.int32, bitcast=True) >> 23)).to(tl.float32)
    return tl.div_rn(times, tl.maximum(weights.to(tl.float32), 1e-30))


@triton.jit
def _kept_weights(record, x, ids, maximum, cut_logit, cut_id):
    """Weights of the tokens that the cut and min_weight leave, 0 of others."""
    weights = jobs.weigh(x, maximum, jobs.real(record + jobs.SCALE).to(tl.float32))
    # Where the tokens left were listed, the cut knows of min_weight.
    least = tl.where(tl.load(record + jobs.SELECTS) == jobs.LISTED, 0, tl.load(record + jobs.MIN_WEIGHT))
    kept = (x > cut_logit) | ((x == cut_logit) & (ids <= cut_id))
    return tl.where(kept & (weights >= least), weights, 0)


@triton.jit
def _sum_parts(
    table, logits, stride, processed, maxima, sums, cut_logits, cut_ids, vocab, num_parts, PARTS: tl.constexpr
):
    job, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    record = table + job * jobs.NUM_FIELDS
    if tl.load(record + jobs.KIND) == jobs.GREEDY:
        return
    _, maximum = jobs.maxima_of(maxima + job * num_parts, num_parts, PARTS)
    if jobs.is_usable(maximum) == 0:
        return
    parts = tile * jobs.TILE + tl.arange(0, jobs.TILE)
    ids = parts[:, None] * jobs.PART + tl.arange(0, jobs.PART)[None, :]
    x = jobs.logits_of(record, logits, stride, processed, vocab, ids, ids < vocab)
    weights = _kept_weights(record, x, ids, maximum, tl.load(cut_logits + job), tl.load(cut_ids + job))
    tl.store(sums + job * num_parts + parts, tl.sum(weights, 1), mask=parts < num_parts)


@triton.jit
def _pick_of_part(record, logits, stride, processed, vocab, part, maximum, cut_logit, cut_id, low, high):
    """The token of a part that wins."""
    ids = part * jobs.PART + tl.arange(0, jobs.PART)
    x = jobs.logits_of(record, logits, stride, processed, vocab, ids, ids < vocab)
    weights = _kept_weights(record, x, ids, maximum, cut_logit, cut_id)
    return part * jobs.PART + tl.argmin(_times(ids.to(tl.uint32), low, high, weights), 0)


@triton.jit
def _pick_before(
    record, logits, stride, processed, vocab, lists, num, maximum, cut_logit, cut_id, low, high
):  # fmt: skip
    """What the tokens up to a cut weigh, and the part of them that wins, of the listed parts."""
    total = tl.zeros([jobs.GROUP], tl.int64)
    best, best_parts = tl.full([jobs.GROUP], jobs.INFINITY, tl.float32), tl.zeros([jobs.GROUP], tl.int32)
    for at in range(0, num, jobs.GROUP):
        places = at + tl.arange(0, jobs.GROUP)
        parts = tl.load(lists + places, mask=places < num, other=0)
        ids = parts[:, None] * jobs.PART + tl.arange(0, jobs.PART)[None, :]
        x = jobs.logits_of(record, logits, stride, processed, vocab, ids, (places < num)[:, None] & (ids < vocab))
        sums = tl.sum(_kept_weights(record, x, ids, maximum, cut_logit, cut_id), 1)
        total += sums
        times = _times(parts.to(tl.uint32) | 0x80000000, low, high, sums)
        best_parts = tl.where(times < best, parts, best_parts)
        best = tl.minimum(times, best)
    first = tl.min(tl.where(best == tl.min(best, 0), best_parts, 0x7FFFFFFF), 0)
    return tl.sum(total, 0), first


@triton.jit
def _drawn(
    record, logits, stride, processed, vocab, num_parts, lists, most, sums, maximum, cut_logit, cut_id,
    PARTS: tl.constexpr,
):  # fmt: skip
    """One token, by `select.draw`."""
    parts = tl.arange(0, PARTS)
    sums = tl.load(sums + parts, mask=parts < num_parts, other=0)
    attempt = tl.full((), 0, tl.int32)
    low, high = _bits(record, attempt)
    part = tl.argmin(_times(parts.to(tl.uint32) | 0x80000000, low, high, sums), 0)
    token = _pick_of_part(record, logits, stride, processed, vocab, part, maximum, cut_logit, cut_id, low, high)
    top_p = jobs.real(record + jobs.TOP_P)
    searches = (top_p < 1.0) & (tl.load(record + jobs.SELECTS) != jobs.LISTED)
    mass = jobs.share(tl.sum(sums, 0), top_p)
    while searches:
        attempt += 1
        low, high = _bits(record, attempt)
        cut_logit, cut_id = jobs.logits_of(record, logits, stride, processed, vocab, token, token < vocab), token - 1
        num = jobs.reaching(most, cut_logit, num_parts, lists, PARTS)
        before, part = _pick_before(
            record, logits, stride, processed, vocab, lists, num, maximum, cut_logit, cut_id, low, high
        )
        searches = before >= mass
        if searches:
            token = _pick_of_part(record, logits, stride, processed, vocab, part, maximum, cut_logit, cut_id, low, high)
    return token


@triton.jit
def _pick(
    table, logits, stride, processed, counts, maxima, sums, cut_logits, cut_ids, lists, drawn, last_tokens, vocab,
    num_parts, PARTS: tl.constexpr,
):  # fmt: skip
    job = tl.program_id(0).to(tl.int64)
    record = table + job * jobs.NUM_FIELDS
    most, maximum = jobs.maxima_of(maxima + job * num_parts, num_parts, PARTS)
    token = tl.full((), 0, tl.int32)
    if jobs.is_usable(maximum):
        if tl.load(record + jobs.KIND) == jobs.GREEDY:
            part = tl.min(tl.where(most == maximum, tl.arange(0, PARTS), PARTS), 0)
            ids = part * jobs.PART + tl.arange(0, jobs.PART)
            x = jobs.logits_of(record, logits, stride, processed, vocab, ids, ids < vocab)
            token = tl.min(tl.where(x == maximum, ids, vocab), 0)
        else:
            token = _drawn(
                record, logits, stride, processed, vocab, num_parts, lists + job * num_parts, most,
                sums + job * num_parts, maximum, tl.load(cut_logits + job), tl.load(cut_ids + job), PARTS,
            )  # fmt: skip
        slot = tl.load(record + jobs.COUNTS)
        if slot >= 0:
            tl.atomic_add(counts + slot * vocab + token, 2)
    failure = tl.where(maximum == -jobs.INFINITY, 1, tl.where(maximum == jobs.INFINITY, 3, 0))
    failure = tl.where(maximum != maximum, 2, failure)
    tl.store(drawn + 2 * job, token)
    tl.store(drawn + 2 * job + 1, failure)
    tl.store(last_tokens + tl.load(record + jobs.ROW), token)


@dataclass(frozen=True)
class Launch:
    """What a launch does.

    Attributes:
        table: int64 on the device: `records`, then what they point to.
        records: RECORD [num_jobs], those of the draws first.
        num_draws: how many of them are draws.
        num_processed: rows of processed logits, float32 [num_processed, V] while the launch runs.
    """

    table: Tensor
    records: Any
    num_draws: int
    num_processed: int


def draw(launch: Launch, logits: Tensor, counts: Tensor, last_tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run the jobs on [N, V] logits, float32 or bfloat16 with adjacent columns, on the current stream.

    Args:
        counts: int32 [slots, V], twice how often an output has a token, plus 1 if its prompt has it; gains the drawn.
        last_tokens: int32 [rows]; gets the drawn tokens, 0 where a row failed.

    Returns: int32 [num_draws, 2], tokens and failures (1: the largest logit is -inf, 2: NaN, 3: inf); int64
        [num_lists, 4], rank of the drawn token (0: the row has no largest logit), total weight, bits of the largest
        and of the token's logit; int64 [num_lists, width], keys of the first top_k in any order.
    """
    vocab, records, num_draws, num_jobs = logits.shape[1], launch.records, launch.num_draws, len(launch.records)
    num_parts = triton.cdiv(vocab, jobs.PART.value)
    selected = records["top_k"][records["selects"] != jobs.NOTHING.value]
    listed_k = records["top_k"][records["selects"] == jobs.LISTED.value].max(initial=0)
    width = 64 if listed_k <= 64 else jobs.MAX_LISTED  # few widths, as each is compiled

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    processed = empty(torch.float32, launch.num_processed, vocab)
    maxima, lists = empty(torch.float32, num_jobs, num_parts), empty(torch.int32, num_jobs, num_parts)
    sums, listed = empty(torch.int64, num_jobs, num_parts), empty(torch.int64, num_jobs if len(selected) else 0, width)
    drawn, facts = empty(torch.int32, num_draws, 2), empty(torch.int64, num_jobs - num_draws, 4)
    row = launch.table, logits, logits.stride(0)
    cuts, sizes = (empty(torch.float32, num_jobs), empty(torch.int32, num_jobs)), (vocab, num_parts)
    tiles = num_jobs, triton.cdiv(num_parts, jobs.TILE.value)
    tile: dict[str, Any] = dict(num_warps=4, enable_fp_fusion=False)
    whole: dict[str, Any] = dict(num_warps=16, enable_fp_fusion=False)  # of programs that have a whole row
    parts: dict[str, Any] = dict(PARTS=max(16, triton.next_power_of_2(num_parts)))
    _scan[tiles](*row, processed, counts, maxima, *cuts, *sizes, **tile)
    if len(selected):
        select[(num_jobs,)](*row, processed, maxima, *cuts, lists, listed, *sizes, WIDTH=width, **parts, **whole)
    if (records["kind"] != jobs.GREEDY.value).any():
        _sum_parts[tiles](*row, processed, maxima, sums, *cuts, *sizes, **parts, **tile)
    _pick[(num_draws,)](
        *row, processed, counts, maxima, sums, *cuts, lists, drawn, last_tokens, *sizes, **parts, **whole
    )
    if num_jobs > num_draws:
        rank[(num_jobs - num_draws,)](*row, maxima, sums, lists, drawn, facts, num_draws, *sizes, **parts, **whole)
    return drawn, facts, listed[num_draws:]


def rehearse(logits: Tensor) -> None:
    """Draw from each row in every way that has kernels of its own, so that they are compiled; for nobody."""
    num, most = len(logits), min(jobs.MAX_LISTED, logits.shape[1])
    for k in (1, most):
        draws, lists = (jobs.list_records([*range(num)], [k] * num, 1.0) for _ in range(2))
        draws["kind"], draws["processed"] = jobs.DRAW.value, range(num)
        records = np.concatenate([draws, lists])
        table = torch.from_numpy(records.view(np.int64)).to(logits.device)
        last_tokens, counts = table.new_empty(num, dtype=torch.int32), table.new_empty(0, dtype=torch.int32)
        draw(Launch(table, records, num, num), logits, counts, last_tokens)
