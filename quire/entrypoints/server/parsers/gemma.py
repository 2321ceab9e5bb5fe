"""Gemma's formats: `call:NAME{key:value}` between marks, with marks around strings, too (FunctionGemma, Gemma 4)."""

from typing import Any

from quire.entrypoints.server.parsers.calls import ArgumentWriter, converted, marked
from quire.entrypoints.server.parsers.forms import Form, Frame, braced_call
from quire.entrypoints.server.parsers.json_script import json_value
from quire.entrypoints.server.parsers.reader import MAX_NAME, Reader, Script, WrongCallError

_MARKS = {"<|tool_call>": "<tool_call|>", "<start_function_call>": "<end_function_call>"}
_QUOTES = ('<|"|>', "<escape>")
_MAX_DEPTH = 64


def _call(read: Reader, mark: str) -> Script[None]:
    yield from read.literal("call:")
    name, _ = yield from read.until("{", most=MAX_NAME)
    writer = ArgumentWriter(read, name.strip())
    while (key := (yield from _key(read))) is not None:
        writer.pair(key, (yield from _value(read, 0)))
    writer.close()
    yield from read.one_of(_MARKS[mark])


def _key(read: Reader) -> Script[str | None]:
    """An object's next key; None at its end."""
    yield from read.one_of(",", spaced=True)
    if (yield from read.one_of("}", spaced=True)):
        return None
    if quote := (yield from read.one_of(*_QUOTES)):
        key, _ = yield from read.until(quote, most=MAX_NAME)
        yield from read.literal(":")
    else:
        key, _ = yield from read.until(":", most=MAX_NAME)
    return key.strip()


def _value(read: Reader, depth: int) -> Script[Any]:
    if depth > _MAX_DEPTH:
        raise WrongCallError
    if quote := (yield from read.one_of(*_QUOTES, spaced=True)):
        return (yield from read.until(quote))[0]
    if (yield from read.peek()) == '"':
        return (yield from json_value(read))
    if (yield from read.one_of("{")):
        found: dict[str, Any] = {}
        while (key := (yield from _key(read))) is not None:
            found[key] = yield from _value(read, depth + 1)
        return found
    if (yield from read.one_of("[")):
        items: list[Any] = []
        while True:
            yield from read.one_of(",", spaced=True)
            if (yield from read.one_of("]", spaced=True)):
                return items
            items.append((yield from _value(read, depth + 1)))
    return (yield from _bare(read))


def _bare(read: Reader) -> Script[Any]:
    """A number or a name; text without marks is text."""
    text = ""
    while (yield from read.peek()) not in (",", "}", "]", ""):
        text += yield from read.character()
        if len(text) > MAX_NAME:
            raise WrongCallError
    if not text.strip():
        raise WrongCallError
    return converted(text, set())


def _frame(template: str) -> Frame:
    opening = next((mark for mark in _MARKS if mark in template), "<|tool_call>")
    quote = next((mark for mark in _QUOTES if mark in template), _QUOTES[0])
    return Frame(opening, braced_call(f"{opening}call:", _MARKS[opening], quote))


FORM = Form(marked(_call, *_MARKS), _frame, marks=(*_MARKS, *_MARKS.values(), *_QUOTES))
