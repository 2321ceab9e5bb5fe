"""Phi-4-mini's format: `functools` and a JSON list of calls, or such a list between `<|tool_call|>` marks."""

from quire.entrypoints.server.parsers.calls import json_calls
from quire.entrypoints.server.parsers.forms import Form, Frame, json_call
from quire.entrypoints.server.parsers.reader import Reader, Script

_MARK, _OPEN, _CLOSE = "functools", "<|tool_call|>", "<|/tool_call|>"


def _script(read: Reader) -> Script[None]:
    while mark := (yield from read.text(_MARK, _OPEN)):
        with read.attempt(mark):
            yield from json_calls(read)
            yield from read.space()
            yield from read.one_of(_CLOSE)


FORM = Form(
    _script,
    Frame(f"{_MARK}[", json_call(), before=f"{_MARK}[", between=", ", after="]"),
    marks=(_OPEN, _CLOSE),
)
