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
        end_ids: the end-of-sequence tokens.
        num_words: of a mask.
    """

    __slots__ = ("_end_ids", "_end_mask", "_start")

    def __init__(self, start: Any, end_ids: tuple[int, ...], num_words: int) -> None:
        self._start = start
        self._end_ids = end_ids
        self._end_mask = mask_of(end_ids, num_words)

    def matcher(self, token_ids: Sequence[int], goes_on: bool) -> "Matcher":
        """A sequence with these output tokens; one that `goes_on` ends only where nothing else is left."""
        matcher = Matcher(self._start.deep_copy(), (self._end_ids, self._end_mask), goes_on)
        matcher.take(token_ids)
        return matcher


class Matcher:
    """Where one sequence stands."""

    __slots__ = ("_end_ids", "_end_mask", "_engine", "_goes_on")

    def __init__(self, engine: Any, ends: tuple[tuple[int, ...], Masks], goes_on: bool) -> None:
        self._engine = engine
        self._end_ids, self._end_mask = ends
        self._goes_on = goes_on

    def copy(self) -> "Matcher":
        """The same, for a fork."""
        return Matcher(self._engine.deep_copy(), (self._end_ids, self._end_mask), self._goes_on)

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

    def fill(self, masks: Masks, drafts: Sequence[int], row: int = 0, address: int = 0) -> None:
        """Write the masks of the next position and of those after each draft, from `row` on.

        After a draft that may not come, nothing is allowed: nobody gets there. `address` is that of `masks`.
        """
        engine, num_taken = self._engine, 0
        num_bytes = 4 * masks.shape[1]
        at = (address or masks.ctypes.data) + row * num_bytes
        for place, draft in enumerate((*drafts, -1), row):
            engine.unsafe_compute_mask_ptr(at, num_bytes)
            at += num_bytes
            if engine.is_error():
                masks[place : row + 1 + len(drafts)] = 0
                return
            if self._goes_on and engine.is_accepting():
                self._put_off_end(masks[place])
            if draft < 0:
                break
            if not int(masks[place, draft >> 5]) >> (draft & 31) & 1 or draft in self._end_ids:
                masks[place + 1 : row + 1 + len(drafts)] = 0
                break
            engine.consume_token(draft)
            num_taken += 1
        if num_taken:
            engine.rollback(num_taken)

    def _put_off_end(self, mask: Masks) -> None:
        for token_id in self._end_ids:
            mask[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
        if not mask.any():
            mask |= self._end_mask
