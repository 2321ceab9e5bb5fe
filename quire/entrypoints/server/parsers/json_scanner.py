"""Follows one JSON value through pieces of text: what of a piece belongs to it, and whether it is complete.

The readers of tool calls hand arguments on with it as they come. What it lets pass is a beginning of valid JSON (line
breaks and tabs within strings, which models write, become escapes). It keeps no text but that of a number.
"""

import json
import re

MAX_DEPTH = 128
_MAX_NUMBER = 400  # characters
_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_BEGUN = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*|(?:\.[0-9]+)?[eE][+-]?[0-9]*)?)?")
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_CLOSES = {"{": "}", "[": "]"}
_BEGINS_VALUE = '{["-0123456789' + "".join(_LITERALS)
_MAY_COME = {
    "value": _BEGINS_VALUE,
    "first [": _BEGINS_VALUE + "]",
    "first {": '"}',
    "key": '"',
    "colon": ":",
    "next": ",]}",
}


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
        self.taken = 0
        self._state = "value"
        self._open: list[str] = []  # the brackets around
        self._is_key = False
        self._rest = ""  # of a literal
        self._number = ""
        self._num_hex = 0
        self._written: list[str] = []  # of this piece, before `_copied`
        self._copied = 0
        self._text = ""
        self._within = {
            "string": self._string,
            "escape": self._escape,
            "hex": self._hex,
            "literal": self._literal,
            "number": self._digits,
        }

    def feed(self, text: str) -> str:
        """Take what belongs to the value, and return it as valid JSON.

        Raises:
            NoJsonError: no JSON goes on like that; `flush` has what was right.
        """
        self._written, self._copied, self.taken = [], 0, 0
        self._text = text
        while not self.done and self.taken < len(text):
            self.taken = self._within.get(self._state, self._between)(text, self.taken)
        return self.flush()

    def flush(self) -> str:
        """What of the latest piece was taken and not returned yet."""
        piece = "".join(self._written) + self._text[self._copied : self.taken]
        self._written, self._copied = [], self.taken
        return piece

    # Each takes at least one character, or changes the state.

    def _between(self, text: str, at: int) -> int:
        """What stands around and between values and keys: space, and one character, which says what comes next."""
        space = _SPACE.match(text, at)
        at = space.end() if space else at
        if at == len(text):
            return at
        char, state = text[at], self._state
        if char not in _MAY_COME[state]:
            raise self._fault(at)
        if char in "{[":
            if len(self._open) == MAX_DEPTH:
                raise self._fault(at)
            self._open.append(char)
            self._state = f"first {char}"
        elif char in "]}":
            if _CLOSES[self._open.pop()] != char:
                raise self._fault(at)
            self._end_value()
        elif char == ",":
            self._state = "key" if self._open[-1] == "{" else "value"
        elif char == ":":
            self._state = "value"
        elif char == '"':
            self._state, self._is_key = "string", state in ("key", "first {")
        elif char in _LITERALS:
            self._state, self._rest = "literal", _LITERALS[char]
        else:
            self._state, self._number = "number", char
        return at + 1

    def _string(self, text: str, at: int) -> int:
        plain = _PLAIN.match(text, at)
        at = plain.end() if plain else at
        if at == len(text):
            return at
        if text[at] == '"':
            if self._is_key:
                self._state = "colon"
            else:
                self._end_value()
        elif text[at] == "\\":
            self._state = "escape"
        else:
            self._written += [text[self._copied : at], json.dumps(text[at])[1:-1]]
            self._copied = at + 1
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        if text[at] not in '"\\/bfnrtu':
            raise self._fault(at)
        self._state, self._num_hex = ("hex" if text[at] == "u" else "string"), 4
        return at + 1

    def _hex(self, text: str, at: int) -> int:
        if text[at] not in "0123456789abcdefABCDEF":
            raise self._fault(at)
        self._num_hex -= 1
        self._state = "hex" if self._num_hex else "string"
        return at + 1

    def _literal(self, text: str, at: int) -> int:
        if text[at] != self._rest[0]:
            raise self._fault(at)
        self._rest = self._rest[1:]
        if not self._rest:
            self._end_value()
        return at + 1

    def _digits(self, text: str, at: int) -> int:
        if text[at] in "+-.eE0123456789":
            self._number += text[at]
            if len(self._number) > _MAX_NUMBER or not _NUMBER_BEGUN.fullmatch(self._number):
                raise self._fault(at)
            return at + 1
        if not _NUMBER.fullmatch(self._number):
            raise self._fault(at)
        self._end_value()
        return at

    def _end_value(self) -> None:
        self._state, self.done = "next", not self._open

    def _fault(self, at: int) -> NoJsonError:
        self.taken = at
        return NoJsonError(f"{self._text[at : at + 20]!r} can't follow")
