"""Formats that no file describes: learned from a chat template that is shown a call, or plain JSON where it has none.

`learned_form` compares what a template writes of a call with what it writes of text. `JSON_CALLS` and `json_arguments`
need no template's help, but a grammar's: they read an answer that is nothing but calls, or one call's arguments.
"""

import os
import re
from collections.abc import Callable
from typing import Any

from quire.entrypoints.server.parsers.base import Function
from quire.entrypoints.server.parsers.calls import ARGUMENT_KEYS, NAME_KEYS, json_calls, marked, marked_json
from quire.entrypoints.server.parsers.forms import Form, Frame, json_call, named_call, schema_of
from quire.entrypoints.server.parsers.json_script import arguments
from quire.entrypoints.server.parsers.reader import MAX_NAME, Reader, Script
from quire.text.grammars.lark import Lark

_NAME, _TEXT, _ID = "probe_of_a_name", "PROBE OF A TEXT", "probe0123"
_ARGUMENTS = {"probe_of_a_key": "probe of a value"}
_USER = {"role": "user", "content": "Hi"}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"probe_of_a_key": {"type": "string"}}},
    },
}
_JSON_ARGUMENTS = re.compile(r"\{\s*\"probe_of_a_key\"\s*:\s*\"probe of a value\"\s*\}")
_LAST_MARKS = re.compile(r"(\s*<[|｜][^<>]*[|｜]>\s*)+$")  # which end the turn, or as good as
_NAME_KEY = re.compile(rf'"({"|".join(NAME_KEYS)})"\s*:\s*"$')
_ARGUMENTS_KEY = re.compile(rf'"({"|".join(ARGUMENT_KEYS)})"\s*:\s*$')
_JSON_HEAD = re.compile(r"\[?\s*\{[^{}]*$")

Render = Callable[[list[dict[str, Any]], list[Any], bool], str]  # messages, tools, whether the answer is opened


def _json_script(read: Reader) -> Script[None]:
    with read.attempt(None):
        yield from json_calls(read, known=True)


JSON_CALLS = Form(_json_script, Frame("", json_call(arguments="parameters"), before="[", between=", ", after="]"))


def json_arguments(name: str) -> Form:
    """The answer is the arguments of this function."""

    def script(read: Reader) -> Script[None]:
        with read.attempt(None):
            read.start(name)
            yield from arguments(read)

    def write(lark: Lark, function: Function) -> str:
        return lark.json(schema_of(function))

    return Form(script, Frame("", write))


def learned_form(render: Render) -> Form | None:
    """The format of the calls that a template writes, if it is text, a name and JSON arguments.

    Raises:
        InvalidRequestError: the template refuses tools.
    """
    call = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    opened = render([_USER], [_TOOL], True)
    written = render([_USER, calling], [_TOOL], False)
    plain = render([_USER, {"role": "assistant", "content": _TEXT}], [_TOOL], False)
    begun = _before_tag(written, max(_common(opened, written), _common(plain, written)))
    found = _JSON_ARGUMENTS.search(written, begun)
    at = written.find(_NAME, begun)
    if found is None or not begun <= at < found.start() or found.start() - at > MAX_NAME:
        return None
    before, middle = written[begun:at], written[at + len(_NAME) : found.start()]
    after = written[found.end() :].rstrip()
    after = _to_tags_end(after, len(after) - _common(after[::-1], plain.partition(_TEXT)[2].rstrip()[::-1]))
    if _ID in before + middle + after:
        return None  # what the model would write there, nobody knows
    if head := _JSON_HEAD.search(before):
        if not (_NAME_KEY.search(before) and _ARGUMENTS_KEY.search(middle)):
            return None
        if (mark := before[: head.start()].strip()) == "":
            return JSON_CALLS
        return _marked_json(mark, before, middle, after)
    return _named(before.lstrip(), middle, after) if before.strip() and middle else None


def _marked_json(mark: str, before: str, middle: str, after: str) -> Form:
    """A mark, then JSON with the name in it."""
    end = after.lstrip().lstrip("}] \n\t").strip()
    call = named_call(before.lstrip(), middle, _LAST_MARKS.sub("", after))
    return Form(marked_json(mark, close=end), Frame(mark, call), marks=(mark, *([end] if end else [])))


def _named(before: str, middle: str, after: str) -> Form:
    """The name between two texts, then the arguments."""

    def call(read: Reader, _: str) -> Script[None]:
        name, _ = yield from read.until(middle, most=MAX_NAME)
        read.start(name.strip())
        yield from arguments(read)
        read.end()
        yield from read.one_of(after, close)

    close = _LAST_MARKS.sub("", after)
    return Form(marked(call, before), Frame(before, named_call(before, middle, close)))


def _before_tag(text: str, at: int) -> int:
    """The place, or the beginning of the tag that it is in."""
    opened = text.rfind("<", 0, at)
    return opened if opened > text.rfind(">", 0, at) and not text[opened:at].count(" ") else at


def _to_tags_end(text: str, at: int) -> str:
    """The text up to a place, or to the end of the tag that this is in."""
    if text.rfind("<", 0, at) > text.rfind(">", 0, at) and (closed := text.find(">", at)) >= 0:
        return text[: closed + 1]
    return text[:at]


def _common(first: str, second: str) -> int:
    """Characters with which both begin."""
    return len(os.path.commonprefix((first, second)))
