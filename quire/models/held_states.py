"""A model's hidden states of one sequence that wait for an EAGLE head to read them, with the tokens after them.

The proposer keeps these and says what was computed, refused and read. Knows no tokens.
"""

from torch import Tensor


class HeldStates:
    """Hidden states of positions up to `end`.

    Attributes:
        num_read: the first position whose token is not read; 1 at least, as nothing stands before the first.
        end: the position after that of the last hidden state held; the first one held is that of num_read - 1.
    """

    def __init__(self) -> None:
        self.num_read, self.end = 1, 0
        self._held: list[Tensor] = []

    def cut(self, end: int) -> None:
        """Forget those from position `end` on: of drafts that were refused."""
        while self.end > end and self._held:
            last = self._held.pop()
            start = self.end - len(last)
            self.end = max(start, end)
            if start < end:
                self._held.append(last[: end - start])

    def add(self, start: int, hidden: Tensor) -> None:
        """Hold those of the positions from `start` on."""
        self.cut(start)
        if self.end < start:  # read by another sequence, or never: go on as if the one before were like this one
            self.num_read, self._held = start, [hidden[:1]]
        self._held.append(hidden)
        self.end = start + len(hidden)

    def take(self, stop: int) -> list[Tensor]:
        """Those to be read with the tokens [num_read, stop), which then are; the last may stay for the next."""
        start, self.num_read = self.num_read - 1, stop
        taken: list[Tensor] = []
        while self._held and start < stop - 1:
            first = self._held.pop(0)
            wanted = min(len(first), stop - 1 - start)
            taken.append(first[:wanted])
            if wanted < len(first):
                self._held.insert(0, first[wanted:])
            start += wanted
        return taken
