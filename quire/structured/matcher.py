"""Grammars that are compiled, and where each sequence stands in its own.

The manager makes a `Grammar`, the scheduler one `Matcher` a sequence. A matcher has taken the tokens that the scheduler
knows, and no others: what it finds out of drafts is taken back. llguidance works below; nothing raises for a user's
grammar, a matcher has an `error` instead and then allows nothing.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.text.grammars.meter import Meter

MAX_FORCED = 8  # tokens drafted at once where the grammar leaves no choice: a key of an object, about

Masks = npt.NDArray[np.uint32]  # [rows, words]: bit t % 32 of word t // 32 is set where token t is allowed


class MaskBuffer:
    """The masks of one step after another, in the same memory; read and written without numpy, a word being cheaper so.

    Attributes:
        array: all of it.
        words: the same in one dimension.
        num_words: of a mask.
        num_bytes: of a mask.
        num_rows: which there is room for.
        address: of the first.
    """

    def __init__(self, num_words: int, num_rows: int = 32) -> None:
        self.num_words, self.num_bytes = num_words, 4 * num_words
        self._use(np.zeros((num_rows, num_words), np.uint32))

    def grow(self, num_rows: int) -> None:
        """Make room for so many rows at least; those there are keep what they have."""
        more = np.zeros((max(num_rows, 2 * self.num_rows), self.num_words), np.uint32)
        more[: self.num_rows] = self.array
        self._use(more)

    def _use(self, array: Masks) -> None:
        self.array, self._bytes = array, array.data.cast("B")
        self.words = self._bytes.cast("I")
        self.num_rows, self.address = len(array), array.ctypes.data

    def single_rows(self, num_rows: int) -> list[int]:
        """Those of the first rows that allow one token alone."""
        rows: list[int] = np.flatnonzero(np.count_nonzero(self.array[:num_rows], 1) == 1).tolist()
        return [row for row in rows if int(self.array[row].max()).bit_count() == 1]

    def first(self, num_rows: int) -> memoryview:
        """The bytes of so many masks, until they are written anew."""
        return self._bytes[: num_rows * self.num_bytes]


class Grammar:
    """A compiled grammar, shared by all that ask for the same.

    Args:
        start: llguidance's matcher before any token; copied and never moved.
        end_ids: the end-of-sequence tokens.
    """

    __slots__ = ("_end_ids", "_meter", "_start")

    def __init__(self, start: Any, end_ids: tuple[int, ...]) -> None:
        self._start, self._end_ids = start, end_ids
        self._meter = Meter()

    def opened(self) -> "Grammar":
        """The same for one request, all sequences of which may take only so much time together."""
        return Grammar(self._start, self._end_ids)

    def matcher(self, token_ids: Sequence[int], goes_on: bool) -> "Matcher":
        """A sequence with these output tokens; one that `goes_on` ends only where nothing else is left."""
        matcher = Matcher(self._start.deep_copy(), self._end_ids, goes_on, self._meter)
        matcher.take(token_ids)
        return matcher


class Matcher:
    """Where one sequence stands.

    Attributes:
        meter: of the time that its request's grammar takes.
        ahead: where the next mask leaves one token, that and what is forced after it, if somebody has looked.
    """

    __slots__ = ("_end_ids", "_goes_on", "_owed", "_settled", "ahead", "meter")

    def __init__(self, engine: Any, end_ids: tuple[int, ...], goes_on: bool, meter: Meter) -> None:
        self._settled = engine
        self._owed: list[int] = []
        self._end_ids, self._goes_on, self.meter = end_ids, goes_on, meter
        self.ahead: list[int] = []

    @property
    def _engine(self) -> Any:
        """llguidance's matcher, which has taken all tokens."""
        if self._owed:
            for token_id in self._owed:
                self._settled.consume_token(token_id)
            self._owed.clear()
        return self._settled

    def copy(self) -> "Matcher":
        """The same, for a fork."""
        return Matcher(self._engine.deep_copy(), self._end_ids, self._goes_on, self.meter)

    @property
    def error(self) -> str | None:
        """Why it allows nothing any more, where that is so: the grammar was too complex to go on."""
        slow = "it took more than half a second in all to work out what may come next" if self.meter.is_spent else ""
        reason = slow or self._engine.get_error().partition("\n")[0].removeprefix("Parser Error: ")
        return f"the grammar became too complex to follow: {reason}. Use a simpler one." if reason else None

    def take(self, token_ids: Sequence[int]) -> None:
        """Go on by these tokens, each of which was allowed."""
        self.ahead = []
        if len(token_ids) == 1:  # as a rule, and it costs less
            self._engine.consume_token(token_ids[0])
        else:
            self._engine.consume_tokens(token_ids)

    def owe(self, token_id: int) -> list[int]:
        """Go on by this token, which was allowed, once somebody asks what may follow it; returns what is forced then.

        That is as far as it was seen ahead: nothing is worked out here.
        """
        self._owed.append(token_id)
        forced, self.ahead = self.ahead[1:], []
        return forced

    @property
    def is_stopped(self) -> bool:
        """Whether only an end may follow."""
        return self._engine.is_stopped()

    def forced(self) -> list[int]:
        """The next tokens, at most MAX_FORCED, where the grammar leaves but one text."""
        return self.meter.timed(self._engine.compute_ff_tokens)[:MAX_FORCED]

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """How many of the drafts may come, before the first that may not."""
        return self._engine.validate_tokens(drafts)

    def fill(self, masks: MaskBuffer, drafts: Sequence[int], row: int = 0) -> None:
        """Write the masks of the next position and of those after each draft, from `row` on.

        After a draft that may not come, nothing is allowed: nobody gets there. After the end all is: what is drawn
        there is left, and must not fail.
        """
        engine, num_bytes, meter = self._engine, masks.num_bytes, self.meter
        meter.timed(engine.unsafe_compute_mask_ptr, masks.address + row * num_bytes, num_bytes)
        if engine.is_error() or meter.is_spent:
            masks.array[row : row + 1 + len(drafts)] = 0
            return
        if self._goes_on and engine.is_accepting():
            self._put_off_end(masks, row)
        if drafts:
            draft = drafts[0]
            allowed = masks.words[row * masks.num_words + (draft >> 5)] >> (draft & 31) & 1
            if not allowed or draft in self._end_ids:
                masks.array[row + 1 : row + 1 + len(drafts)] = 0xFFFFFFFF if allowed else 0
                return
            engine.consume_token(draft)
            self.fill(masks, drafts[1:], row + 1)
            engine.rollback(1)

    def _put_off_end(self, masks: MaskBuffer, row: int) -> None:
        """Let no end come, unless nothing else may."""
        words, first = masks.words, row * masks.num_words
        for token_id in self._end_ids:
            words[first + (token_id >> 5)] &= ~(1 << (token_id & 31))
        if not any(words[first : first + masks.num_words]):
            for token_id in self._end_ids:
                words[first + (token_id >> 5)] |= 1 << (token_id & 31)
