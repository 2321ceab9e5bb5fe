"""Which tokens may be drawn, with what weight, and the draw: pure functions of one row of logits.

Probabilities are integers: weight = floor(exp((logit - max) / temperature) * 2**40). Integer sums don't depend on their
order, so a row's outcome depends on neither batch nor thread, and no rounding can put a draw past the end. The order of
tokens is: larger logit first, then lower id. Called by the sampler, logprobs and who judges drafts; knows no request.
csrc/sampler.h does the same, with the same bits.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.sampling.state import Floats, Ids

WEIGHT_BITS = 40  # weights sum below 2**63 for any vocabulary under 2**23 tokens
_FULL_WEIGHT = 2**WEIGHT_BITS
_MAX_LISTED = 1024  # up to this top_k the tokens left are listed in order
_PART = 512  # ids that stand for one in the first race of a draw
_IS_PART = 1 << 31  # in a part's number: no token has it
_SLICE = 2**15  # logits of a row weighed at once: arrays of 128 KiB, which stay in L2

# 2**f = 1 + f * (... ) on [-0.5, 0.5], within 2e-7 of itself: the coefficients of f**5 to f**0.
_POWER = [
    np.array(float.fromhex(c), np.float32)
    for c in ("0x1.5bd97ap-10", "0x1.3ce8b2p-7", "0x1.c6b6dap-5", "0x1.ebf9c2p-3", "0x1.62e42ap-1", "0x1p0")
]
_LOG2_E = np.float32(math.log2(math.e))
_LOWEST = np.array(-42, np.float32)  # 2**-42 * 2**40 weighs 0 and is an ordinary number
_ROUNDER = np.array(1.5 * 2**23 + 127 + WEIGHT_BITS, np.float32)  # y + this: rounded, its last bits 2**y's exponent
_EXPONENT_AT = np.array(23, np.int32)
# 2 atanh(z) / ln 2 = z * (... + z**2 * (...)), z in (0, 1/3]: the coefficients of z**11 to z.
_ATANH = [np.float32(2 / math.log(2) / n) for n in (11, 9, 7, 5, 3, 1)]
_NOTHING = np.float32(1e-30)  # instead of 0: who weighs that comes last
_HALF, _TWO, _SMALLEST = np.float32(0.5), np.float32(2), np.float32(2**-32)

Weights = npt.NDArray[np.int64]


def weigh(logits: Floats, maximum: float, temperature: float = 1.0) -> Weights:
    """Integer weights, int64 [V], of float32 logits [V]; `maximum`, the row's largest (finite), weighs 2**40."""
    # By steps that IEEE 754 gives one result each, as the last bits of numpy's exp depend on the CPU. Not in torch,
    # whose thread pool would wake for a few thousand elements, which costs more than it saves.
    scale = power_scales(temperature)
    weights = np.empty(len(logits), np.int64)
    memory = np.empty((3, min(len(logits), _SLICE)), np.float32)
    for start in range(0, len(logits), _SLICE):
        part = logits[start : start + _SLICE]
        y, rounded, power = memory[:, : len(part)]
        np.subtract(part, np.float32(maximum), out=y)
        y *= scale
        _full_powers(y, rounded, power)
        weights[start : start + _SLICE] = y
    return weights


def power_scales(temperature: float) -> Any:
    """log2(e) / temperature, float32: exp(x / temperature) = 2**(x * scale)."""
    return _LOG2_E / np.float32(temperature)


def _full_powers(y: Floats, rounded: Floats, power: Floats) -> None:
    """Replace `y`, at most 0, by 2**(y + 40), not rounded down; the others are memory for it."""
    np.maximum(y, _LOWEST, out=y)
    np.add(y, _ROUNDER, out=rounded)
    np.subtract(rounded, _ROUNDER, out=power)
    y -= power  # in [-0.5, 0.5]
    np.multiply(y, _POWER[0], out=power)
    for coefficient in _POWER[1:-1]:
        power += coefficient
        power *= y
    power += _POWER[-1]
    bits = rounded.view(np.int32)
    bits <<= _EXPONENT_AT
    np.multiply(power, rounded, out=y)


def leading_ids(logits: Floats, k: int) -> Ids:
    """Ids of the first min(k, number not masked) tokens, in order: larger logit first, then lower id.

    No sort of the vocabulary: the k-th largest of 2k or more column maxima is at most the k-th largest logit, and few
    tokens reach it.
    """
    size = len(logits)
    num_rows = size // (2 * _MAX_LISTED)
    if k >= size:
        bound = -math.inf
    elif k <= _MAX_LISTED and num_rows >= 2:
        num_columns = size // num_rows
        maxima = logits[: num_rows * num_columns].reshape(num_rows, num_columns).max(0)
        bound = np.partition(maxima, num_columns - k)[num_columns - k]
    else:
        bound = np.partition(logits, size - k)[size - k]
    ids = np.flatnonzero(logits >= bound if bound > -math.inf else logits > -math.inf)
    return ids[np.argsort(-logits[ids], kind="stable")[:k]]


class DrawTable:
    """Tokens, ascending, with weights (not all 0): what one token is drawn from.

    `ids` None stands for [0, len(weights)).
    """

    def __init__(self, ids: Ids | None, weights: Weights) -> None:
        self.ids, self.weights = ids, weights
        if ids is None:
            self._starts = np.arange(0, len(weights), _PART)
            self._parts = self._starts // _PART
        else:
            parts = ids // _PART
            self._starts = np.flatnonzero(np.diff(parts, prepend=-1))
            self._parts = parts[self._starts]
        self._sums = np.add.reduceat(weights, self._starts)
        self.total = int(self._sums.sum())

    def pick(self, bits: int) -> int:
        """The token that wins two races, with chances as the weights are; never one of weight 0.

        First the parts of the vocabulary race against each other, then the tokens of the one that won. Each has a time
        of its own, made of the bits and its number, which its weight divides: the first in the goal wins. So two tables
        that are alike mostly give the same token for the same bits: a draft is accepted, then.
        """
        part = _winner(self._parts | _IS_PART, self._sums, bits) if len(self._parts) > 1 else 0
        start = int(self._starts[part])
        end = int(self._starts[part + 1]) if part + 1 < len(self._starts) else len(self.weights)
        ids = np.arange(start, end) if self.ids is None else self.ids[start:end]
        return int(ids[_winner(ids, self.weights[start:end], bits)])


def _winner(numbers: Ids, weights: Weights, bits: int) -> int:
    return int((race_times(numbers, bits) / np.maximum(weights.astype(np.float32), _NOTHING)).argmin())


def race_times(numbers: Ids, bits: int) -> Floats:
    """Exponentially distributed times, in float32: of each number, under 64 random bits. Above 0."""
    words = _mix(numbers.astype(np.uint32) * np.uint32(0x9E3779B9) + np.uint32(bits & 0xFFFFFFFF))
    words = _mix(words + np.uint32(bits >> 32))
    # -log2(1 - u) of a u in (0, 1/2], by 2 atanh(u / (2 - u)), and then as many halves as a coin says.
    u = ((words >> np.uint32(1)).astype(np.float32) + _HALF) * _SMALLEST
    z = u / (_TWO - u)
    square = z * z
    times = np.full(len(z), _ATANH[0], np.float32)
    for coefficient in _ATANH[1:]:
        times *= square
        times += coefficient
    times *= z
    coins = (_mix(words + np.uint32(0x9E3779B9)) >> np.uint32(8) | np.uint32(1)).astype(np.float32)
    halves = np.int32(23 + 127) - (coins.view(np.int32) >> _EXPONENT_AT)
    times += halves.astype(np.float32)
    return times


def _mix(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Wellons's hash of 32 bits with low bias."""
    words = (words ^ words >> np.uint32(16)) * np.uint32(0x7FEB352D)
    words = (words ^ words >> np.uint32(15)) * np.uint32(0x846CA68B)
    return words ^ words >> np.uint32(16)


def candidates(
    logits: Floats, maximum: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[DrawTable, int]:
    """The tokens left by min_p and top_k, and the mass of top_p for `draw` (0: the table is cut to it already).

    min_p leaves tokens of at least min_p times the largest probability; top_k the first k of those; top_p the fewest
    first of those whose mass is at least top_p of theirs.
    """
    floor = math.ceil(min_p * _FULL_WEIGHT)
    if top_k <= _MAX_LISTED:
        ids = leading_ids(logits, top_k)
        weights = weigh(logits[ids], maximum, temperature)
        num_kept = int(np.count_nonzero(weights >= floor))
        if top_p < 1.0:
            sums = np.cumsum(weights[:num_kept])
            num_kept = int(np.searchsorted(sums, _share(int(sums[-1]), top_p))) + 1
        order = np.argsort(ids[:num_kept])
        return DrawTable(ids[order], weights[order]), 0
    weights = weigh(logits, maximum, temperature)
    if floor:
        weights *= weights >= floor
    if top_k < len(logits):
        last = np.partition(logits, len(logits) - top_k)[len(logits) - top_k]
        reaches = logits >= last
        ties = np.flatnonzero(logits == last)
        excess = int(np.count_nonzero(reaches)) - top_k
        reaches[ties[len(ties) - excess :]] = False
        weights *= reaches
    table = DrawTable(None, weights)
    return table, _share(table.total, top_p) if top_p < 1.0 else 0


def kept_weights(logits: Floats, maximum: float, temperature: float, top_k: int, top_p: float, min_p: float) -> Weights:
    """The weights, int64 [V], that `draw` chooses by: those of `candidates`, and 0 beyond the mass of top_p."""
    table, mass = candidates(logits, maximum, temperature, top_k, top_p, min_p)
    if table.ids is not None:
        weights = np.zeros(len(logits), np.int64)
        weights[table.ids] = table.weights
        return weights
    if not mass:
        return table.weights
    weights, num = np.zeros(len(logits), np.int64), _MAX_LISTED
    while table.weights[order := leading_ids(logits, num)].sum() < mass:  # few tokens have it, as a rule
        num *= 4
    ordered = table.weights[order]
    kept = order[np.cumsum(ordered) - ordered < mass]
    weights[kept] = table.weights[kept]
    return weights


def draw(table: DrawTable, mass: int, logits: Floats, random_bits: Callable[[int], int]) -> int:
    """One token of `table`; with `mass`, of the fewest first tokens that have that much, which takes no sort:

    a token is one of them if those before it have less. If not, all from it on are none either: they are dropped, and
    attempt 1, 2, ... is drawn from the rest, so that the tokens of the mass keep their relative chances. Attempts are
    total / mass in the mean at most. `random_bits` gives 64 bits for an attempt; `logits` are those of the table.
    """
    weights = table.weights
    attempt = 0
    while True:
        token_id = table.pick(random_bits(attempt))
        if not mass:
            return token_id
        before = ids_before(logits, token_id)
        weights_before = weights[before]
        if int(weights_before.sum()) < mass:
            return token_id
        table = DrawTable(before, weights_before)
        attempt += 1


def ids_before(logits: Floats, token_id: int) -> Ids:
    """Ids, ascending, of the tokens that come before `token_id` in the order."""
    value = logits[token_id]
    before = logits > value
    before[:token_id] |= logits[:token_id] == value
    return np.flatnonzero(before)


def _share(total: int, top_p: float) -> int:
    """The mass that top_p asks for. In floating point, so that 0.1 of ten equal weights is one of them."""
    return min(total, math.ceil(top_p * total))
