"""The processor time that one request's grammar has taken beyond the little that each token may cost.

Matchers of `quire.structured` ask it: an ambiguous grammar takes more time with every token, while others wait for
their own. The compiler limits what a single token may cost. It knows no grammars.
"""

import time

STEP_ITEMS = 5000  # of llguidance's parser for a mask: a tenth of a second; schemas that people use need far fewer
FREE_SECONDS = 0.002  # a mask or a forced text may take so long, again and again
_SECONDS = 0.5  # beyond that, of a request


class Meter:
    """What is left to the sequences of one request.

    Attributes:
        clock: what to time with: of processor time only once something was slow, as that clock is slow itself.
        is_spent: whether nothing is left.
    """

    __slots__ = ("_left", "clock", "is_spent")

    def __init__(self) -> None:
        self._left = _SECONDS
        self.clock = time.perf_counter
        self.is_spent = False

    def add(self, seconds: float) -> None:
        """Something took so long, more than FREE_SECONDS; the first time that may have been others' doing."""
        if self.clock is time.thread_time:
            self._left -= seconds - FREE_SECONDS
            self.is_spent = self._left < 0
        self.clock = time.thread_time
