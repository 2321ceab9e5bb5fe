"""Calls as several formats write them: a JSON object with a name and arguments, and arguments that are no JSON.

The formats' scripts use it. `json_calls` reads one object, or a list of them; `ArgumentWriter` makes a JSON object of
arguments that come one by one in some other notation.
"""

import json
from collections.abc import Callable
from typing import Any

import msgspec

from quire.entrypoints.server.parsers.base import Function
from quire.entrypoints.server.parsers.json_script import arguments, json_text, json_value
from quire.entrypoints.server.parsers.reader import Reader, Reads, Script, WrongCallError, is_object

_KINDS = {bool: "boolean", int: "integer number", float: "number", list: "array", dict: "object", type(None): "null"}
NAME_KEYS, ARGUMENT_KEYS = ("name", "function", "tool_name"), ("arguments", "parameters")


def json_calls(read: Reader, known: bool = False) -> Script[None]:
    """Calls as `{"name": ..., "arguments": {...}}`, or a list of such.

    Args:
        known: only a call of a tool that is on offer is one; anything else may be an answer in JSON.

    Raises:
        WrongCallError: it is none.
    """
    is_list = (yield from read.one_of("[", spaced=True)) is not None
    while True:
        yield from read.space()
        yield from _json_call(read, known)
        if not is_list or (yield from read.one_of(",", spaced=True)) is None:
            break
    if is_list:
        yield from read.literal("]")


def marked(call: Callable[[Reader, str], Script[object]], *marks: str, around: tuple[str, ...] = ()) -> Reads:
    """The script of calls that each follow a mark, which `call` is told; marks `around` them are no text either."""

    def script(read: Reader) -> Script[None]:
        while mark := (yield from read.text(*marks, *around)):
            if mark in marks:
                with read.attempt(mark):
                    yield from call(read, mark)

    return script


def marked_json(*marks: str, close: str) -> Reads:
    """The script of such calls after a mark, closed or not."""

    def call(read: Reader, _: str) -> Script[None]:
        yield from json_calls(read)
        yield from read.one_of(close, spaced=True)

    return marked(call, *marks)


def whole_or_marked(mark: str, calls: Reads) -> Reads:
    """The script of calls that are the whole answer, with or without the mark, or that come after the mark in it."""

    def script(read: Reader) -> Script[None]:
        with read.attempt(None):
            yield from calls(read)
        yield from marked(lambda read, _: calls(read), mark)(read)

    return script


def _json_call(read: Reader, known: bool, inner: bool = False) -> Script[None]:
    """One object. Its name comes before or after its arguments; other fields are skipped."""
    name, held, begun = None, list[str](), False
    yield from read.literal("{")
    while True:
        yield from read.space()
        key = yield from json_value(read)
        yield from read.literal(":", spaced=True)
        yield from read.space()
        if key == "function" and not (inner or begun) and (yield from read.peek()) == "{":
            yield from _json_call(read, known, inner=True)
            begun, name = True, ""
        elif key in NAME_KEYS and name is None:
            name, read.is_sure = (yield from json_value(read)), known
            if known and name not in tuple(read.functions):  # it may be anything
                raise WrongCallError
        elif key in ARGUMENT_KEYS and name is not None and not begun:
            read.start(name)
            begun = True
            yield from arguments(read)
        elif key in ARGUMENT_KEYS and not begun and not held:
            yield from json_text(read, held.append)
        else:
            yield from json_value(read)
        if (yield from read.one_of(",", spaced=True)) is None:
            break
    yield from read.literal("}")
    if not begun:
        text = _object_text("".join(held))
        read.start(name)
        read.send(text)
    if not inner:
        read.end()


def _object_text(text: str) -> str:
    """Arguments that came before the name."""
    value = json.loads(text) if text else None
    if value in (None, "", {}):
        return "{}"
    if not (isinstance(value, dict) or is_object(value)):
        raise WrongCallError
    return value if isinstance(value, str) else text


class ArgumentWriter:
    """Starts a call, and sends its arguments one by one as a JSON object."""

    def __init__(self, read: Reader, function: str) -> None:
        self._read = read
        self._num = 0
        self._types = types_of(read.functions.get(function))
        read.start(function)

    def pair(self, key: str, value: Any) -> None:
        """An argument and its value.

        Raises:
            WrongCallError: JSON has no such value, as it has no infinity.
        """
        try:
            text = to_json(value)
        except ValueError:
            raise WrongCallError from None
        self._key(key)
        self._read.send(text)

    def argument(self, key: str, mark: str, hold: str = "") -> Script[None]:
        """An argument whose value stands before a mark: text as it comes, or what its schema makes of it."""
        types = self._types.get(key, {"string"})
        if types == {"string"}:
            self._key(key)
            self._read.send('"')
            try:
                yield from self._read.pieces_until(lambda piece: self._read.send(to_json(piece)[1:-1]), mark, hold)
            finally:
                self._read.send('"')
        else:
            text, _ = yield from self._read.until(mark)
            self.pair(key, converted(text.removesuffix(hold), types))

    def close(self) -> None:
        """No more arguments: the call is whole."""
        self._read.send("}" if self._num else "{}")
        self._read.end()

    def _key(self, key: str) -> None:
        self._read.send(("{" if self._num == 0 else ", ") + to_json(key) + ": ")
        self._num += 1


def converted(text: str, types: set[str]) -> Any:
    """The value that is written so, where its schema has it be of these types; what is no JSON is text."""
    word = text.strip()
    if word == "None" or (word.lower() in ("true", "false") and "boolean" in types):
        value = {"none": None, "true": True, "false": False}[word.lower()]
    else:
        try:
            value = msgspec.json.decode(word)
        except (ValueError, RecursionError):
            return text if "string" in types else word
    # What may be text is that, as 42 and true are, unless it is of another kind that it may be.
    return text if "string" in types and types.isdisjoint(_KINDS.get(type(value), "string").split()) else value


def types_of(function: Function | None) -> dict[str, set[str]]:
    """The JSON types that a function's arguments may have, where its schema says them; empty: any."""
    properties = function.parameters.get("properties") if function else None
    return {name: _types(schema) for name, schema in properties.items()} if isinstance(properties, dict) else {}


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return {kinds}
    if isinstance(kinds, list):
        return {kind for kind in kinds if isinstance(kind, str)}
    if isinstance(values := schema.get("enum"), list) and all(isinstance(value, str) for value in values):
        return {"string"}
    lists = [parts for name in ("anyOf", "oneOf") if isinstance(parts := schema.get(name), list)]
    parts = [_types(part) for parts in lists for part in parts]
    return set().union(*parts) if all(parts) else set()


def to_json(value: Any) -> str:
    """As JSON, with escapes only where UTF-8 needs them."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text
