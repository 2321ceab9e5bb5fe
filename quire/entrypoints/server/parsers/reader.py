"""What a format's script reads its text with: marks, names and JSON, across pieces of any length.

A script is a generator: each of a `Reader`'s methods that may have to wait for more text is one, too, so a script says
what comes after what and knows nothing of pieces. `ScriptParser` makes a `Parser` of it. What no call can be made of is
handed on as text.
"""

import re
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from quire.entrypoints.server.parsers import base

_T = TypeVar("_T")
Script = Generator[None, None, _T]
Reads = Callable[["Reader"], Script[object]]
MAX_NAME = 256  # characters of a tool's name
_SURE = 4  # characters of a mark that nothing but a call begins with
_BROKEN = "\ufffd"  # stands for a character of which only some bytes came


class WrongCallError(Exception):
    """The text is no call after all, or breaks off."""


class Reader:
    """The text of one choice, as far as it has come, and the events that a script made of it.

    Attributes:
        is_sure: whether what is being read can only be a call, as it has the name of a tool on offer.
        unsaid: the mark that ends the answer, and is no part of it, where there is one.
    """

    def __init__(self, offer: base.Offer, new_id: Callable[[], str]) -> None:
        """`new_id` makes an id for a call."""
        self.offer, self.new_id = offer, new_id
        self.unsaid: tuple[str, ...] = ()
        self.functions = {function.name: function for function in offer.functions}
        self.num_calls = 0
        self._events: list[base.ContentEvent] = []
        self._text, self._at = "", 0
        self._closed = self._cut = False
        self._lost = False  # the text was cut within a call: what is left of it is no text
        self._try_from: int | None = None  # where an attempt to read a call began, after its mark
        self._mark = ""
        self._kind: type[base.TextDelta] | type[base.ReasoningDelta] = base.TextDelta
        self._spaces = ""  # at the end of what was said: shown when more follows
        self._calling = self._sent = self._after_call = self.is_sure = False

    # For the parser.

    def feed(self, text: str) -> None:
        """More text."""
        kept = self._at if self._try_from is None or self._calling else self._try_from
        self._text, self._at = self._text[kept:] + text, self._at - kept
        if self._try_from is not None:
            self._try_from -= kept

    def close(self, cut: bool) -> None:
        """There is no more text; `cut`: there would have been, and what had begun to be a call is no answer."""
        self._closed, self._cut = True, cut
        sure = len(self._mark) >= _SURE or self._calling or self._after_call or self.is_sure
        self._lost = cut and self._try_from is not None and sure

    def take_events(self) -> list[base.ContentEvent]:
        """The events since the last time."""
        events, self._events = self._events, []
        return events

    # Text.

    def text(
        self, *marks: str, kind: type[base.TextDelta] | type[base.ReasoningDelta] = base.TextDelta
    ) -> Script[str | None]:
        """Hand on text until a mark, which is returned; None at the text's end. Space before a mark is held back."""
        self._kind = kind
        while True:
            sought = marks + self.unsaid
            found = _any_of(sought).search(self._text, self._at) if sought else None
            if found is not None:
                self._say(self._text[self._at : found.start()])
                self._at = found.end()
                if found[0] not in self.unsaid:
                    return found[0]
                self.unsaid, self._spaces = (), ""
                continue
            begun = _begun(self._text, self._at, sought)
            if self._closed:
                begun = self._num_lost(begun)
            end = len(self._text) - begun
            self._say(self._text[self._at : end])
            self._at = end
            if self._closed:
                if begun:
                    self._at, self._spaces = len(self._text), ""
                if self._spaces and not self._after_call:
                    self._show("")
                return None
            yield

    def _num_lost(self, begun: int) -> int:
        """Characters at the end of a text that was cut which are no text; `begun`: those that may begin a mark."""
        if self._lost:
            return len(self._text) - self._at
        sure = begun >= _SURE or self._after_call or self.offer.choice == "required"
        return begun if self._cut and sure else 0

    def hold_spaces(self, spaces: str) -> None:
        """Have these, in place of those that were held back, come before the next text."""
        self._spaces = spaces

    def _say(self, text: str) -> None:
        shown = text.rstrip()
        if shown:
            self._show(shown)
        self._spaces += text[len(shown) :]

    def _show(self, text: str) -> None:
        self._events.append(self._kind(self._spaces + text))
        self._spaces, self._after_call = "", False

    # What a call is made of.

    def peek(self) -> Script[str]:
        """The next character, none where the text ends."""
        while self._at >= len(self._text) and not self._closed:
            yield
        return self._text[self._at : self._at + 1]

    def space(self) -> Script[None]:
        """Skip white space."""
        while (yield from self.peek()).isspace():
            self._at += 1

    def one_of(self, *choices: str, spaced: bool = False) -> Script[str | None]:
        """Take the one that comes next, the longest that fits; None (and it is not taken) where none does.

        `spaced`: white space that comes first is skipped, whatever follows it.
        """
        if spaced:
            yield from self.space()
        for choice in sorted(choices, key=len, reverse=True):
            while True:
                have = self._text[self._at : self._at + len(choice)]
                if have == choice:
                    self._at += len(choice)
                    return choice
                if self._closed or not choice.startswith(have):
                    break
                yield
        return None

    def literal(self, wanted: str, spaced: bool = False) -> Script[None]:
        """Take what has to come next. `spaced`: as in `one_of`.

        Raises:
            WrongCallError: it does not.
        """
        if (yield from self.one_of(wanted, spaced=spaced)) is None:
            raise WrongCallError

    def until(self, *marks: str, most: int = 1 << 20) -> Script[tuple[str, str]]:
        """The text before a mark, and the mark, both taken.

        Raises:
            WrongCallError: the text ends before, or has more characters than `most`.
        """
        seen, longest = 0, max(map(len, marks))
        while True:
            found = _any_of(marks).search(self._text, self._at + seen)
            end = found.start() if found else len(self._text) - longest + 1
            seen = max(0, end - self._at)
            if seen > most or (found is None and self._closed):
                raise WrongCallError
            if found is not None:
                text, self._at = self._text[self._at : end], found.end()
                return text, found[0]
            yield

    def pieces_until(self, sink: Callable[[str], Any], mark: str, hold: str = "") -> Script[None]:
        """Give the text before a mark to `sink`, in pieces; the mark is taken.

        Args:
            hold: what is no part of the text right before the mark.

        Raises:
            WrongCallError: the text ends before; what there is was given.
        """
        marks = (hold + mark, mark) if hold else (mark,)
        while True:
            found = _any_of(marks).search(self._text, self._at)
            end = found.start() if found else len(self._text) - _begun(self._text, self._at, marks)
            if not found and self._closed:
                end = len(self._text)
            if piece := self._text[self._at : end]:
                self._at = end
                sink(piece)
            if found:
                self._at = found.end()
                return
            if self._closed:
                raise WrongCallError
            yield

    def run_of(self, pattern: re.Pattern[str], sink: Callable[[str], Any]) -> Script[None]:
        """Give to `sink`, in pieces, what matches a pattern that is a character any number of times."""
        while True:
            if (found := pattern.match(self._text, self._at)) is not None and found[0]:
                self._at = found.end()
                sink(found[0])
            if self._at < len(self._text) or self._closed:
                return
            yield

    def put_back(self, text: str) -> None:
        """Have what was just taken come once more."""
        if self._calling:  # what is taken then is not kept
            self._text, self._at = text + self._text[self._at :], 0
        else:
            self._at -= len(text)

    def character(self, choices: str = "") -> Script[str]:
        """The next character.

        Raises:
            WrongCallError: there is none, or it is none of these, where there are any.
        """
        while (found := self._text[self._at : self._at + 1]) == "" and not self._closed:
            yield
        if not found or (choices and found not in choices):
            raise WrongCallError
        self._at += 1
        return found

    # Calls.

    @contextmanager
    def attempt(self, mark: str | None) -> Iterator[None]:
        """Within, a call is read, after this mark; where it turns out to be none, what was read is text.

        A call that had begun ends where it went wrong, and text goes on from there.
        """
        self._try_from, self._mark, self.is_sure = self._at, mark or "", self.offer.choice == "required"
        try:
            yield
        except WrongCallError:
            if self._lost:
                self._at, self._spaces = len(self._text), ""
            elif not self._calling:
                self._at = self._try_from
                self._say(self._mark)
        finally:
            if self._calling:
                if not self._sent:
                    self.send("{")  # which says that it is not whole
                self.end()
            self._try_from = None

    def start(self, name: Any, id: str | None = None) -> None:
        """A call begins.

        Raises:
            WrongCallError: that is no name.
        """
        if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name) <= MAX_NAME:
            raise WrongCallError
        self._events.append(base.ToolCallStart(self.num_calls, id or self.new_id(), name))
        self.num_calls += 1
        self._calling, self._sent, self._spaces = True, False, ""

    def send(self, arguments: str) -> None:
        """More of the call's arguments."""
        if arguments:
            self._events.append(base.ToolCallDelta(self.num_calls - 1, arguments))
            self._sent = True

    def end(self) -> None:
        """The call is complete."""
        if not self._sent:
            self.send("{}")
        self._events.append(base.ToolCallEnd(self.num_calls - 1))
        self._calling, self._after_call = False, True
        self._try_from, self._mark = self._at, ""  # another call may follow within the attempt


class ScriptParser(base.Parser):
    """A `Parser` that runs a script."""

    def __init__(self, script: Reads, offer: base.Offer, new_id: Callable[[], str]) -> None:
        self._reader = Reader(offer, new_id)
        self._script = _to_the_end(script, self._reader)

    def push(self, text: str) -> list[base.ContentEvent]:
        self._reader.feed(text)
        next(self._script, None)
        return self._reader.take_events()

    def finish(self, cut: bool = False) -> list[base.ContentEvent]:
        self._reader.close(cut)
        next(self._script, None)
        return self._reader.take_events()


def _to_the_end(script: Reads, reader: Reader) -> Script[None]:
    yield from script(reader)
    yield from reader.text()


@lru_cache(maxsize=256)
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True)))


def _begun(text: str, start: int, marks: tuple[str, ...]) -> int:
    """Characters at the text's end that may be the beginning of a mark, whose last character may be broken."""
    if not marks:
        return 0
    whole = len(text.rstrip(_BROKEN))
    for at in range(max(start, whole - max(map(len, marks)) + 1), whole):
        begin = text[at:whole]
        if any(mark.startswith(begin) for mark in marks):
            return len(text) - at
    return 0


def is_object(text: Any) -> bool:
    """Whether it is the text of a JSON object."""
    try:
        return isinstance(text, str) and isinstance(msgspec.json.decode(text), dict)
    except (ValueError, RecursionError):  # a lone surrogate is a ValueError, too, which no answer could hold
        return False
