"""A job of the device's sampler, one row of logits, and what its kernels share: the row's parts, weights and order.

Weights are those of quire/sampling/select.py: each step rounds as IEEE 754 says, so that nothing may be fused. Used by
sampler.py and sampler_select.py; quire.sampling.device makes the records. Knows no kernel.
"""

# Triton's functions say that they may return tuples, and take what they call constexpr.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import triton
import triton.language as tl

# What a job is. All fields are of 64 bits; those of kernels' float32 are float64 here.
RECORD = np.dtype(
    [
        ("kind", "i8"),  # GREEDY, DRAW or LIST
        ("row", "i8"),  # of `last_tokens`; of a LIST job: the draw whose token it ranks
        ("source", "i8"),  # row of the logits
        ("position", "i8"),  # of the token in its output
        ("seed", "i8"),
        ("sequence_index", "i8"),
        ("top_k", "i8"),  # at most the vocabulary
        ("top_p", "f8"),
        ("min_weight", "i8"),
        ("scale", "f8"),  # log2(e) / temperature
        ("repetition", "f8"),
        ("frequency", "f8"),
        ("presence", "f8"),
        ("selects", "i8"),  # NOTHING; CUT: the first top_k; LISTED: these, listed, then min_weight's and top_p's
        ("counts", "i8"),  # its row of the counts, -1: none
        ("processed", "i8"),  # its row of the processed logits, -1: they are not processed
        ("mask", "i8"),  # where in the table its bitmask begins, -1: none
        ("biases", "i8"),  # where in the table the ascending ids begin; their biases follow
        ("num_biases", "i8"),
    ]
)
MAX_LISTED = 1024  # as in select.py

NUM_FIELDS = tl.constexpr(len(RECORD.names or ()))
KIND, ROW, SOURCE, POSITION, SEED, SEQUENCE, TOP_K, TOP_P, MIN_WEIGHT, SCALE = map(tl.constexpr, range(10))
REPETITION, FREQUENCY, PRESENCE, SELECTS, COUNTS, PROCESSED, MASK, BIASES, NUM_BIASES = map(tl.constexpr, range(10, 19))
GREEDY, DRAW, LIST = map(tl.constexpr, range(3))  # kinds
NOTHING, CUT, LISTED = map(tl.constexpr, range(3))  # what is selected
PART = tl.constexpr(512)  # ids that stand for one in the first race of a draw
TILE = tl.constexpr(4)  # parts of a program that has no more of its row
GROUP = tl.constexpr(16)  # parts at once of a program that has its whole row
INFINITY = tl.constexpr(math.inf)
LAST = tl.constexpr(2**63 - 1)  # no token's key

_C5, _C4, _C3, _C2, _C1 = (
    tl.constexpr(float.fromhex(c))
    for c in ("0x1.5bd97ap-10", "0x1.3ce8b2p-7", "0x1.c6b6dap-5", "0x1.ebf9c2p-3", "0x1.62e42ap-1")
)
_ROUNDER = tl.constexpr(1.5 * 2**23 + 127 + 40)


@triton.jit
def real(at):
    """A field that is a real number, float64."""
    return tl.load(at).to(tl.float64, bitcast=True)


@triton.jit
def logits_of(record, logits, stride, processed, vocab, ids, inside):
    """Logits of a job as float32: its processed ones, where it has any; -inf where there are none."""
    slot = tl.load(record + PROCESSED)
    if slot >= 0:
        x = tl.load(processed + slot * vocab + ids, mask=inside, other=-INFINITY)
    else:
        x = tl.load(logits + tl.load(record + SOURCE) * stride + ids, mask=inside, other=-INFINITY).to(tl.float32)
    return x


@triton.jit
def maxima_of(maxima, num_parts, PARTS: tl.constexpr):
    """The largest logit of each part, [PARTS], and of all: NaN if any is."""
    parts = tl.arange(0, PARTS)
    most = tl.load(maxima + parts, mask=parts < num_parts, other=-INFINITY)
    is_nan = tl.max((most != most).to(tl.int32), 0)
    return most, tl.where(is_nan > 0, float("nan"), tl.max(tl.where(most == most, most, -INFINITY), 0))


@triton.jit
def is_usable(maximum):
    return (maximum > -INFINITY) & (maximum < INFINITY)  # not of NaN


@triton.jit
def list_parts(chosen, lists, PARTS: tl.constexpr):
    """Write the numbers of the chosen parts, [PARTS], into `lists`, ascending; returns how many they are."""
    places = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.debug_barrier()  # all have read what the list was before, and then all see what it is
    tl.store(lists + places, tl.arange(0, PARTS), mask=chosen)
    tl.debug_barrier()
    return tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def reaching(most, bound, num_parts, lists, PARTS: tl.constexpr):
    """Those whose largest logit is at least `bound`, by `list_parts`."""
    return list_parts((most >= bound) & (tl.arange(0, PARTS) < num_parts), lists, PARTS)


@triton.jit
def group(lists, at, num, vocab):
    """Ids of the listed parts from place `at` on, [GROUP * PART], and whether there are such."""
    flat = tl.arange(0, GROUP * PART)
    place = at + flat // PART
    ids = tl.load(lists + place, mask=place < num, other=0) * PART + flat % PART
    return ids, (place < num) & (ids < vocab)


@triton.jit
def weigh(x, maximum, scale):
    """Weights, int64, of logits of at most `maximum`, which weighs 2**40."""
    y = tl.maximum((x - maximum) * scale, -42.0)
    rounded = y + _ROUNDER  # the last bits are the exponent of 2**(y + 40)
    y = y - (rounded - _ROUNDER)  # in [-0.5, 0.5]
    power = y * _C5
    power = (power + _C4) * y
    power = (power + _C3) * y
    power = (power + _C2) * y
    power = (power + _C1) * y
    power = power + 1.0
    exponent = rounded.to(tl.int32, bitcast=True) << 23
    return (power * exponent.to(tl.float32, bitcast=True)).to(tl.int64)


@triton.jit
def share(total, top_p):
    """min(total, ceil(top_p * total)), in float64."""
    product = total.to(tl.float64) * top_p
    down = product.to(tl.int64)
    return tl.minimum(total, down + (down.to(tl.float64) < product).to(tl.int64))


@triton.jit
def order_of(x):
    """int32 that ascend as logits descend; one for both zeros."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return ~tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def logit_of(order):
    """The logit of that order."""
    bits = ~order
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


def selection(greedy: bool, top_k: int, top_p: float, vocab: int) -> tuple[int, int]:
    """A draw's kind, and what it selects."""
    if greedy:
        return GREEDY.value, NOTHING.value
    if top_k <= MAX_LISTED and (top_k < vocab or top_p < 1.0):
        return DRAW.value, LISTED.value
    return DRAW.value, CUT.value if top_k < vocab else NOTHING.value


def list_records(draws: list[int], top_ks: list[int], scale: float) -> Any:
    """Records of LIST jobs: of each draw's raw row the first top_k tokens, and the drawn one's rank."""
    records = np.zeros(len(draws), RECORD)
    records["kind"], records["row"], records["source"], records["top_k"] = LIST.value, draws, draws, top_ks
    records["top_p"], records["scale"] = 1.0, scale
    records["selects"] = np.where(records["top_k"] > 0, LISTED.value, NOTHING.value)
    records["counts"] = records["processed"] = records["mask"] = -1
    return records


def listed_logprobs(
    facts: Any, listed: Any, token_ids: list[int], nums: list[int]
) -> Iterator[tuple[list[int], list[float], list[int]]]:
    """Of what `draw` returns for LIST jobs: ids, log-probabilities, ranks, of the drawn token and `nums` likely ones.

    As quire/sampling/logprobs.py has them, with the same steps; of all rows at once, as that takes far less time.
    """
    keys = listed[:, : max(nums)] if max(nums) else np.empty((len(nums), 0), np.int64)
    keys = np.sort(np.where(np.arange(keys.shape[1]) < np.array(nums)[:, None], keys, LAST.value))
    bits = ~(keys >> 32).astype(np.int32)
    likely = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(np.float32)
    place = np.arange(keys.shape[1])
    is_tie = np.zeros(keys.shape, np.bool_)
    is_tie[:, 1:] = likely[:, 1:] == likely[:, :-1]
    ranks = np.maximum.accumulate(np.where(is_tie, 0, place), 1) + 1
    maximum, drawn = facts[:, 2:].astype(np.int32).view(np.float32).T.astype(np.float64)
    shift = [math.log(total) - 40 * math.log(2) if rank else 0.0 for rank, total in facts[:, :2].tolist()]
    values = np.concatenate([drawn[:, None], likely], 1)
    logprobs = (values - (maximum + shift)[:, None]).astype(np.float32)
    for i, (token_id, num) in enumerate(zip(token_ids, nums, strict=True)):
        if rank := int(facts[i, 0]):
            of_likely = keys[i, :num] & 0xFFFFFFFF
            yield [token_id, *of_likely.tolist()], logprobs[i, : 1 + num].tolist(), [rank, *ranks[i, :num].tolist()]
        else:  # as if all were masked
            yield [token_id, *range(num)], [-math.inf] * (1 + num), [1] * (1 + num)
