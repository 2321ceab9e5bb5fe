"""The processor time that one request's grammar has taken beyond the little that each token may cost.

Matchers of `quire.structured` ask it: an ambiguous grammar takes more time with every token, while others wait for
their own. The compiler limits what a single token may cost. It knows no grammars.
"""

import time
from collections.abc import Callable
from typing import Any

STEP_ITEMS = 5000  # of llguidance's parser for a mask: a tenth of a second; schemas that people use need far fewer
FREE_SECONDS = 0.002  # a mask or a forced text may take so long, again and again
_SECONDS = 0.5  # beyond that, of a request


class Meter:
    """What is left to the sequences of one request.

    Attributes:
        is_watching: whether each mask and forced text is to be timed: once a step's took long together, as clocks take
            nearly as long as what they time.
        is_spent: whether nothing is left.
    """

    __slots__ = ("_clock", "_left", "is_spent", "is_watching")

    def __init__(self) -> None:
        self._left, self._clock = _SECONDS, time.perf_counter
        self.is_watching = self.is_spent = False

    def timed(self, function: Callable[..., Any], *args: Any) -> Any:
        """What the function returns, once its time is counted where that is watched."""
        if not self.is_watching:
            return function(*args)
        start = (clock := self._clock)()
        result = function(*args)
        if (seconds := clock() - start) > FREE_SECONDS:
            self.add(seconds)
        return result

    def add(self, seconds: float) -> None:
        """Something took so long, more than FREE_SECONDS; the first time that may have been others' doing."""
        if self._clock is time.thread_time:  # which is slow itself: not before it is needed
            self._left -= seconds - FREE_SECONDS
            self.is_spent = self._left < 0
        self._clock = time.thread_time
