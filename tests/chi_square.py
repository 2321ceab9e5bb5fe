"""Whether tokens are drawn from a distribution, by the chi-square test; the distribution computed anew, in float64."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire import SamplingParams

Floats = npt.NDArray[np.float64]
_SIGMAS = 4.5  # a true hypothesis is refused with 3e-6; seeds are fixed, so that a test fails always or never


def target(logprobs: Floats, params: SamplingParams, output: Sequence[int] = ()) -> Floats:
    """The distribution of the next token of [V] raw log-probabilities, after presence and frequency penalties,
    temperature, min_p, top_k and top_p; repetition penalties would need the logits."""
    logits = logprobs.copy()
    for token_id, count in Counter(output).items():
        logits[token_id] -= params.presence_penalty + params.frequency_penalty * count
    if params.allowed_token_ids is not None:
        logits[np.setdiff1d(np.arange(len(logits)), params.allowed_token_ids)] = -np.inf
    logits /= params.temperature
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    probs[probs < params.min_p * probs.max()] = 0.0
    order = np.argsort(-probs, kind="stable")
    if params.top_k > 0:
        probs[order[params.top_k :]] = 0.0
    probs /= probs.sum()
    if params.top_p < 1.0:
        sums = np.cumsum(probs[order])
        probs[order[1:][sums[:-1] >= params.top_p]] = 0.0
    return probs / probs.sum()


class ChiSquare:
    """A sum of chi-squares of several distributions, and its degrees of freedom."""

    def __init__(self) -> None:
        self.sum, self.freedom, self.num_draws, self.num_impossible = 0.0, 0, 0, 0

    def add(self, drawn: Iterable[int], probs: Floats) -> None:
        """Tokens drawn from `probs`; those expected less than five times are one cell."""
        counts = np.bincount(list(drawn), minlength=len(probs)).astype(np.float64)
        num = counts.sum()
        self.num_draws += int(num)
        self.num_impossible += int(counts[probs == 0].sum())
        expected = probs * num
        large = expected >= 5
        cells = [*zip(counts[large], expected[large], strict=True)]
        if expected[~large].sum() >= 5:
            cells.append((counts[~large].sum(), expected[~large].sum()))
        self.sum += sum((count - wanted) ** 2 / wanted for count, wanted in cells)
        self.freedom += max(0, len(cells) - 1)

    @property
    def limit(self) -> float:
        """By Wilson and Hilferty: the cube root of chi-square / freedom is nearly normal."""
        part = 2 / (9 * self.freedom)
        return self.freedom * (1 - part + _SIGMAS * math.sqrt(part)) ** 3

    @property
    def fits(self) -> bool:
        return not self.num_impossible and self.sum < self.limit

    def __repr__(self) -> str:
        return f"{self.sum:.0f} of at most {self.limit:.0f}, {self.freedom} degrees, {self.num_impossible} impossible"


def raw_logprobs(output: Any) -> Floats:
    """[V], of the first token of a request that asked for all."""
    (step,) = output.outputs[0].logprobs
    return np.array([step[token_id].logprob for token_id in range(len(step))])
