"""Granite's formats: `<|tool_call|>` and a JSON list of calls (3.x), or `<tool_call>` around one object each (4)."""

from quire.entrypoints.server.parsers import hermes
from quire.entrypoints.server.parsers.calls import json_calls
from quire.entrypoints.server.parsers.forms import Form, Frame, json_call
from quire.entrypoints.server.parsers.reader import Reader, Script

_MARK = "<|tool_call|>"


def _script(read: Reader) -> Script[None]:
    while mark := (yield from read.text(_MARK, hermes.OPEN)):
        with read.attempt(mark):
            yield from json_calls(read)
            yield from read.space()
            yield from read.one_of(hermes.CLOSE)


def _frame(template: str) -> Frame:
    if hermes.OPEN in template:
        return hermes.FORM.frame_for(template)
    return Frame(_MARK, json_call(), before=f"{_MARK}[", between=", ", after="]")


FORM = Form(_script, _frame, marks=(_MARK, hermes.OPEN, hermes.CLOSE))
