"""The tokens of one live sequence, in the place where they are kept: its row.

The worker's rows make one per sequence; sampler, processors and proposers read it, and the runner alone appends. There
is no second list of a sequence's tokens in a worker.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

NO_DRAFT = -1  # after drafts: the token there is to be drawn


class SequenceTokens:
    """Prompt, output, and then drafts that nobody has accepted yet.

    Attributes:
        ids: int32 [width], a view of the row: [0, num_prompt) prompt, [num_prompt, num) output, [num, num + num_drafts)
            drafts, zeros.
        num_prompt, num, num_drafts: as above.
        num_virtual: the first ones of the prompt, which stand for an adapter's.
    """

    __slots__ = ("ids", "num", "num_drafts", "num_prompt", "num_virtual")

    def __init__(self, ids: npt.NDArray[np.int32], num_prompt: int, num: int, num_virtual: int = 0) -> None:
        self.num_virtual, self.ids, self.num_prompt = num_virtual, ids, num_prompt
        self.num = num
        self.num_drafts = 0

    @property
    def position(self) -> int:
        """Index in the output of the token to be drawn next."""
        return self.num - self.num_prompt

    def prompt(self) -> list[int]:
        """A copy of the prompt, as its user knows it."""
        return self.ids[self.num_virtual : self.num_prompt].tolist()

    def output(self) -> list[int]:
        """A copy of the output."""
        return self.ids[self.num_prompt : self.num].tolist()

    def tail(self, count: int) -> list[int]:
        """A copy of the last tokens of the output, at most so many."""
        return self.ids[max(self.num_prompt, self.num - count) : self.num].tolist()

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft of the next token."""
        return self.num_drafts > 0 and self.ids[self.num] != NO_DRAFT

    def drafts(self) -> list[int]:
        """A copy of the drafts."""
        return self.ids[self.num : self.num + self.num_drafts].tolist()

    def append(self, token_id: int) -> None:
        """Append a token; it takes the place of the first draft, where there are any."""
        self.ids[self.num] = token_id
        self.num += 1
        if self.num_drafts:
            self.num_drafts -= 1

    def accept(self, num_drafts: int, token_id: int) -> None:
        """Let the first drafts be tokens, append the one that was drawn after them, and forget the other drafts."""
        place, end = self.num + num_drafts, self.num + self.num_drafts
        self.ids[place] = token_id
        if place + 1 < end:
            self.ids[place + 1 : end] = 0
        self.num, self.num_drafts = place + 1, 0

    def set_drafts(self, token_ids: Sequence[int]) -> None:
        """Let these be the drafts, instead of those there are; [] to forget them."""
        start = self.num
        if self.num_drafts:
            self.ids[start : start + self.num_drafts] = 0
        if token_ids:
            self.ids[start : start + len(token_ids)] = token_ids
        self.num_drafts = len(token_ids)
