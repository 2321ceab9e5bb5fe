"""Grammars that are compiled, and where each sequence stands in its own.

The manager makes a `Grammar`, the scheduler one `Matcher` a sequence. A matcher has taken the tokens that the scheduler
knows, and no others: what it finds out of drafts is taken back. llguidance works below; nothing raises for a user's
grammar, a matcher has an `error` instead and then allows nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_FORCED = 8  # tokens drafted at once where the grammar leaves no choice: a key of an object, about

Masks = npt.NDArray[np.uint32]  # [rows, words]: bit t % 32 of word t // 32 is set where token t is allowed


def mask_of(token_ids: Iterable[int], num_words: int) -> Masks:
    """[words], with the bits of these tokens."""
    mask = np.zeros(num_words, np.uint32)
    for token_id in token_ids:
        mask[token_id >> 5] |= np.uint32(1 << (token_id & 31))
    return mask


class Grammar:
    """A compiled grammar, shared by all that ask for the same.

    Args:
        start: llguidance's matcher before any token; copied and never moved.
        end_mask: [words], the end-of-sequence tokens.
    """

    __slots__ = ("_end_mask", "_start")

    def __init__(self, start: Any, end_mask: Masks) -> None:
        self._start = start
        self._end_mask = end_mask

    def matcher(self, token_ids: Sequence[int], goes_on: bool) -> "Matcher":
        """A sequence with these output tokens; one that `goes_on` ends only where nothing else is left."""
        matcher = Matcher(self._start.deep_copy(), self._end_mask, goes_on)
        matcher.take(token_ids)
        return matcher


class Matcher:
    """Where one sequence stands."""

    __slots__ = ("_end_mask", "_engine", "_goes_on")

    def __init__(self, engine: Any, end_mask: Masks, goes_on: bool) -> None:
        self._engine = engine
        self._end_mask = end_mask
        self._goes_on = goes_on

    def copy(self) -> "Matcher":
        """The same, for a fork."""
        return Matcher(self._engine.deep_copy(), self._end_mask, self._goes_on)

    @property
    def error(self) -> str | None:
        """Why it allows nothing any more, where that is so: the grammar was too complex to go on."""
        if not self._engine.is_error():
            return None
        reason = self._engine.stop_reason()
        return f"the grammar became too complex to follow ({reason}); use a simpler one."

    def take(self, token_ids: Sequence[int]) -> bool:
        """Go on by these tokens, each of which was allowed; returns whether only an end may follow."""
        self._engine.consume_tokens(token_ids)
        return self._engine.is_stopped()

    def forced(self) -> list[int]:
        """The next tokens, at most MAX_FORCED, where the grammar leaves but one text."""
        return self._engine.compute_ff_tokens()[:MAX_FORCED]

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """How many of the drafts may come, before the first that may not."""
        return self._engine.validate_tokens(drafts)

    def fill(self, masks: Masks, drafts: Sequence[int]) -> None:
        """Write the masks of the next position and of those after each draft, [1 + drafts, words].

        After a draft that may not come, nothing is allowed: nobody gets there.
        """
        engine, num_taken = self._engine, 0
        for place, mask in enumerate(masks):
            engine.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if engine.is_error():
                masks[place:] = 0
                return
            if self._goes_on:
                self._put_off_end(mask)
            if place == len(drafts):
                break
            draft = drafts[place]
            if not int(mask[draft >> 5]) >> (draft & 31) & 1 or self._is_end(draft):
                masks[place + 1 :] = 0
                break
            engine.consume_token(draft)
            num_taken += 1
        if num_taken:
            engine.rollback(num_taken)

    def _is_end(self, token_id: int) -> bool:
        return bool(int(self._end_mask[token_id >> 5]) >> (token_id & 31) & 1)

    def _put_off_end(self, mask: Masks) -> None:
        others = mask & ~self._end_mask
        if others.any():
            mask[:] = others
