"""Follows one JSON value through pieces of text: what of a piece belongs to it, and whether it is complete.

The readers of tool calls hand arguments on with it as they come. What it lets pass is a beginning of valid JSON (line
breaks and tabs within strings, which models write, become escapes). It keeps no text but that of a number. Each kind of
value is a generator that yields where it needs the next piece.
"""

import json
import re
import string
from collections.abc import Generator

MAX_DEPTH = 128
_MAX_NUMBER = 400  # characters
_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_BEGUN = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*|(?:\.[0-9]+)?[eE][+-]?[0-9]*)?)?")
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_CLOSES = {"{": "}", "[": "]"}
_BEGINS_VALUE = '{["-0123456789' + "".join(_LITERALS)


class NoJsonError(ValueError):
    """The text is not the beginning of any JSON value."""


class JsonScanner:
    """One value.

    Attributes:
        done: it is complete. A number by itself is so once something else follows.
        taken: characters of the latest piece that belong to the value, up to the fault where there was one.
    """

    def __init__(self) -> None:
        self.done = False
        self.taken = self._copied = 0
        self._text = ""
        self._written: list[str] = []  # of this piece, before `_copied`
        self._run = self._whole()

    def feed(self, text: str) -> str:
        """Take what belongs to the value, and return it as valid JSON.

        Raises:
            NoJsonError: it can't go on so. What came before is lost unless `flush` is called.
        """
        self._text, self._written, self._copied, self.taken = text, [], 0, 0
        next(self._run, None)
        return self.flush()

    def flush(self) -> str:
        """What of the latest piece was taken and not returned yet."""
        piece = "".join(self._written) + self._text[self._copied : self.taken]
        self._written, self._copied = [], self.taken
        return piece

    def _whole(self) -> Generator[None, None, None]:
        yield from self._value((yield from self._next(_BEGINS_VALUE)), 0)
        self.done = True

    def _value(self, begin: str, depth: int) -> Generator[None, None, None]:
        if begin == '"':
            yield from self._string()
        elif begin in _CLOSES:
            if depth == MAX_DEPTH:
                self.taken -= 1
                raise NoJsonError
            yield from self._members(begin, depth + 1)
        elif begin in _LITERALS:
            for wanted in _LITERALS[begin]:
                yield from self._one_of(wanted)
        else:
            yield from self._number(begin)

    def _members(self, begin: str, depth: int) -> Generator[None, None, None]:
        close, begins = _CLOSES[begin], '"' if begin == "{" else _BEGINS_VALUE
        found = yield from self._next(begins + close)
        while found != close:
            if begin == "{":
                yield from self._string()
                yield from self._next(":")
                found = yield from self._next(_BEGINS_VALUE)
            yield from self._value(found, depth)
            if (yield from self._next("," + close)) == close:
                return
            found = yield from self._next(begins)

    def _string(self) -> Generator[None, None, None]:
        while True:
            yield from self._skip(_PLAIN)
            if (char := self._text[self.taken]) < " ":
                self._written += [self._text[self._copied : self.taken], json.dumps(char)[1:-1]]
                self._copied = self.taken + 1
            self.taken += 1
            if char == '"':
                return
            if char == "\\" and (yield from self._one_of('"\\/bfnrtu')) == "u":
                for _ in range(4):
                    yield from self._one_of(string.hexdigits)

    def _number(self, text: str) -> Generator[None, None, None]:
        while (char := (yield from self._peek())) in "+-.eE0123456789":
            text += char
            if len(text) > _MAX_NUMBER or not _NUMBER_BEGUN.fullmatch(text):
                raise NoJsonError
            self.taken += 1
        if not _NUMBER.fullmatch(text):
            raise NoJsonError

    def _next(self, choices: str) -> Generator[None, None, str]:
        """One of these characters, perhaps after space."""
        yield from self._skip(_SPACE)
        return (yield from self._one_of(choices))

    def _one_of(self, choices: str) -> Generator[None, None, str]:
        if (char := (yield from self._peek())) not in choices:
            raise NoJsonError
        self.taken += 1
        return char

    def _peek(self) -> Generator[None, None, str]:
        while self.taken == len(self._text):
            yield
        return self._text[self.taken]

    def _skip(self, pattern: re.Pattern[str]) -> Generator[None, None, None]:
        """Take what matches, to the first character that does not."""
        while True:
            if (found := pattern.match(self._text, self.taken)) is not None:
                self.taken = found.end()
            if self.taken < len(self._text):
                return
            yield
