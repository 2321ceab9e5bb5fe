"""Histograms: how many values were at most so large, as Prometheus counts them.

The block pools fill some, and the server's recorder, on the event loop, once a token at the most. They know neither
Prometheus nor what they count.
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
