"""Hermes' format, which Qwen 2.5 and 3 have, too: `<tool_call>` around a JSON object with name and arguments."""

from quire.entrypoints.server.parsers.calls import json_calls
from quire.entrypoints.server.parsers.forms import Form, Frame, json_call
from quire.entrypoints.server.parsers.reader import Reader, Script

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _script(read: Reader) -> Script[None]:
    while mark := (yield from read.text(OPEN)):
        with read.attempt(mark):
            yield from json_calls(read)
            yield from read.space()
            yield from read.literal(CLOSE)


FORM = Form(_script, Frame(OPEN, json_call(f"{OPEN}\n", f"\n{CLOSE}"), between="\n"), marks=(OPEN, CLOSE))
