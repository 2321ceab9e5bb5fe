"""A model's hidden states of one sequence that wait for an EAGLE head to read them, with the tokens after them.

The proposer keeps these and says what was computed, refused and read. Knows no tokens.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.config.draft_tree import DraftTree
from quire.models.growing_tree import path_of

Ids = npt.NDArray[np.int32]


class HeldStates:
    """Hidden states of positions up to `end`.

    Attributes:
        num_read: the first position whose token is not read; 1 at least, as nothing stands before the first.
        first: what `num_read` was when nothing was.
        end: the position after that of the last hidden state held; the first one held is that of num_read - 1.
    """

    def __init__(self) -> None:
        self.num_read = self.first = 1
        self.end = 0
        self._held: list[Tensor] = []
        self._tree: DraftTree | None = None
        self._drafts: Sequence[int] = ()

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
        if not self.end and start:  # read by another sequence: go on as if the one before were like this one
            self.num_read, self.first, self._held = start, start, [hidden[:1]]
        elif self.end < start:  # unknown, as drafts did not pay: as if all of them were
            self._held.append(hidden[:1].expand(start - self.end, -1))
        self._held.append(hidden)
        self.end = start + len(hidden)

    def expect(self, tree: DraftTree, drafts: Sequence[int]) -> None:
        """The last ones are of the first nodes of a tree, whose tokens are `drafts`, that is not judged yet."""
        self._tree, self._drafts = tree, drafts

    def settle(self, tokens: Ids, num: int) -> None:
        """Keep, of such nodes, those of the accepted path; `tokens` are the sequence's, `num` with the newest one."""
        if self._tree is None or not self._drafts:
            return
        start = self.end - len(self._drafts)
        path = path_of(self._tree, self._drafts, tokens[start : num - 1].tolist())
        nodes = self._held.pop()
        first = len(nodes) - len(self._drafts)
        self._held.append(nodes[[*range(first), *(first + node for node in path)]])
        self.end, self._drafts = start + len(path), ()

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
