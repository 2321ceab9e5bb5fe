"""JSON as a script: one value, handed on as it comes, as far as it is valid.

The readers of tool calls have it from here. What passes is a beginning of valid JSON (line breaks and tabs within
strings, which models write, become escapes), and nothing is kept but the text of a number.
"""

import json
import re
import string
from collections.abc import Callable
from typing import Any

from quire.entrypoints.server.parsers.reader import Reader, Script, WrongCallError, is_object

MAX_DEPTH = 128
_MAX_NUMBER = 400  # characters
_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_BEGUN = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*|(?:\.[0-9]+)?[eE][+-]?[0-9]*)?)?")
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_CLOSES = {"{": "}", "[": "]"}
_BEGINS_PLAIN = '"-0123456789' + "".join(_LITERALS)
_BEGINS = _BEGINS_PLAIN + "".join(_CLOSES)

_Put = Callable[[str], None]


def json_text(read: Reader, sink: Callable[[str], Any]) -> Script[None]:
    """Give a JSON value to `sink`, in pieces.

    Raises:
        WrongCallError: it is none, or breaks off; what was right was given.
    """
    pieces: list[str] = []

    def hand_on() -> None:
        if pieces:
            sink("".join(pieces))
        pieces.clear()

    try:
        for _ in _whole(read, pieces.append):
            hand_on()
            yield
    finally:
        hand_on()


def json_value(read: Reader) -> Script[Any]:
    """A JSON value, read."""
    pieces: list[str] = []
    yield from json_text(read, pieces.append)
    return json.loads("".join(pieces))


def arguments(read: Reader) -> Script[None]:
    """Send a JSON object, or one that is written as a JSON string, or null or an empty string for none."""
    yield from read.space()
    match (yield from read.peek()):
        case "{":
            yield from json_text(read, read.send)
        case '"':
            text = yield from json_value(read)
            if text and not is_object(text):
                raise WrongCallError
            read.send(text)
        case _:
            yield from read.literal("null")


def _whole(read: Reader, put: _Put) -> Script[None]:
    yield from _value(read, put, (yield from _next(read, put, _BEGINS)), 0)


def _value(read: Reader, put: _Put, begin: str, depth: int) -> Script[None]:
    """What this character begins, within so many objects and lists."""
    if begin == '"':
        yield from _string(read, put)
    elif begin in _CLOSES:
        yield from _members(read, put, begin, depth + 1)
    elif begin in _LITERALS:
        for wanted in _LITERALS[begin]:
            yield from _one_of(read, put, wanted)
    else:
        yield from _number(read, put, begin)


def _members(read: Reader, put: _Put, begin: str, depth: int) -> Script[None]:
    close, values = _CLOSES[begin], _BEGINS if depth < MAX_DEPTH else _BEGINS_PLAIN
    begins = '"' if begin == "{" else values
    found = yield from _next(read, put, begins + close)
    while found != close:
        if begin == "{":
            yield from _string(read, put)
            yield from _next(read, put, ":")
            found = yield from _next(read, put, values)
        yield from _value(read, put, found, depth)
        if (yield from _next(read, put, "," + close)) == close:
            return
        found = yield from _next(read, put, begins)


def _string(read: Reader, put: _Put) -> Script[None]:
    while True:
        yield from read.run_of(_PLAIN, put)
        char = yield from read.character()
        put(char if char >= " " else json.dumps(char)[1:-1])
        if char == '"':
            return
        if char == "\\" and (yield from _one_of(read, put, '"\\/bfnrtu')) == "u":
            for _ in range(4):
                yield from _one_of(read, put, string.hexdigits)


def _number(read: Reader, put: _Put, text: str) -> Script[None]:
    while _NUMBER_BEGUN.fullmatch(text + (char := (yield from read.peek()) or " ")):
        if len(text) == _MAX_NUMBER:
            raise WrongCallError
        text += char
        yield from _one_of(read, put, char)
    if char in "+-.eE0123456789" or not _NUMBER.fullmatch(text):
        raise WrongCallError


def _next(read: Reader, put: _Put, choices: str) -> Script[str]:
    """One of these characters, perhaps after space."""
    yield from read.run_of(_SPACE, put)
    return (yield from _one_of(read, put, choices))


def _one_of(read: Reader, put: _Put, choices: str) -> Script[str]:
    char = yield from read.character(choices)
    put(char)
    return char
