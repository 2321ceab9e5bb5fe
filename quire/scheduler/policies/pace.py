"""How long a step of so many tokens takes, learnt from the steps there were.

The deadline policy measures with it. It knows seconds and tokens only.
"""

_KEEP = 0.98  # what a step's weight is after the next: the last fifty or so count
_ENOUGH = 3.0  # total weight from which on anything is said


class Pace:
    """A straight line through (tokens, seconds), by least squares; newer steps weigh more.

    Neither a step's fixed part nor a token's may come out negative: a line that is too steep or falls is replaced by
    one through the origin, or a level one.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of weights, and by weight of tokens, seconds, tokens squared, tokens times seconds
        self._fixed = self._per_token = 0.0
        self._is_stale = False

    @property
    def is_known(self) -> bool:
        """Whether enough was measured to say anything."""
        return self._sums[0] >= _ENOUGH

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step was measured."""
        new = (1.0, num_tokens, seconds, num_tokens * num_tokens, num_tokens * seconds)
        self._sums = [old * _KEEP + one for old, one in zip(self._sums, new, strict=True)]
        self._is_stale = True

    def seconds(self, num_tokens: float) -> float:
        """What a step of so many tokens is expected to take."""
        if self._is_stale:
            self._fit()
        return self._fixed + self._per_token * num_tokens

    def tokens(self, seconds: float) -> float:
        """Tokens of the largest step that is expected to take no longer; infinite where tokens cost nothing."""
        left = seconds - self.seconds(0)
        return left / self._per_token if self._per_token > 0 else float("inf") if left >= 0 else 0.0

    def _fit(self) -> None:
        self._is_stale = False
        w, wx, wy, wxx, wxy = self._sums
        spread = wxx - wx * wx / w
        slope = (wxy - wx * wy / w) / spread if spread > 1e-6 * wxx else 0.0
        slope = max(slope, 0.0)
        fixed = (wy - slope * wx) / w
        if fixed < 0.0:
            fixed, slope = 0.0, wxy / wxx
        self._fixed, self._per_token = fixed, slope
