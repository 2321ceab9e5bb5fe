"""Histograms: how many values were at most so large, as Prometheus counts them, and quantiles of what was counted.

The recorder fills them on the event loop, once a token at the most; /metrics and the live view read them. They know
neither Prometheus nor what they count.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate


class Histogram:
    """Counts of values in buckets of fixed bounds.

    Attributes:
        name: of the Prometheus metric.
        help: one line about it.
        bounds: largest value of each bucket; one more bucket holds what is larger than all of them.
        counts: values of each bucket (not cumulative).
        total: sum of the values.
    """

    __slots__ = ("_shown", "bounds", "counts", "help", "name", "total")

    def __init__(self, name: str, help: str, shown: Sequence[float], finer: Iterable[float] = ()) -> None:
        """`shown` are the bounds that Prometheus gets, `finer` ones are for quantiles only."""
        self.name = name
        self.help = help
        self._shown = shown
        self.bounds = sorted({*shown, *finer})
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[float, int]]:
        """Each shown bound and how many values are not above it; infinity comes last."""
        below = [*accumulate(self.counts)]
        shown = [(bound, below[bisect_left(self.bounds, bound)]) for bound in self._shown]
        return [*shown, (float("inf"), below[-1])]


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which `share` (0 to 1) of the counted values lie, even within its bucket; None without values."""
    num_values = sum(counts)
    if not num_values:
        return None
    rank, below = share * num_values, 0
    for index, count in enumerate(counts):
        if count and below + count >= rank:
            low = bounds[index - 1] if index else 0.0
            high = bounds[min(index, len(bounds) - 1)]  # nothing is known beyond the last bound
            return low + (high - low) * (rank - below) / count
        below += count
    return bounds[-1]


def one_two_five(largest: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... up to `largest`."""
    bounds = [float(mantissa * 10**power) for power in range(len(str(largest))) for mantissa in (1, 2, 5)]
    return [bound for bound in bounds if bound <= largest]


def geometric(smallest: float, largest: float, per_decade: int) -> list[float]:
    """Bounds from `smallest` up, each larger than the last by the same factor, to the first beyond `largest`."""
    bounds = [smallest]
    while bounds[-1] < largest:
        bounds.append(smallest * 10 ** (len(bounds) / per_decade))
    return bounds
