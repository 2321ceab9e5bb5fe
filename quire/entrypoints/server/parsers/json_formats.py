"""Formats that differ in what stands around their calls, each of which is a JSON object with the name in it.

Hermes', which Qwen 2.5 and 3 have, too; Granite's, of which 3.x has a list of calls, and 4 what Hermes has;
Phi-4-mini's, a list after a word or between marks; Llama 3's, where the whole answer is a call. An answer that merely
is JSON stays one there: only the names of tools on offer make a call.
"""

from quire.entrypoints.server.parsers.calls import json_calls, marked_json, whole_or_marked
from quire.entrypoints.server.parsers.forms import Form, Frame, json_call
from quire.entrypoints.server.parsers.reader import Reader, Script

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_GRANITE, _PHI, _END_PHI = "<|tool_call|>", "functools", "<|/tool_call|>"
_LLAMA = "<|python_tag|>"

_HERMES = Frame(OPEN, json_call(f"{OPEN}\n", f"\n{CLOSE}"), between="\n")
HERMES = Form(marked_json(OPEN, close=CLOSE), _HERMES, marks=(OPEN, CLOSE))


def _granite_frame(template: str) -> Frame:
    if OPEN in template:
        return _HERMES
    return Frame(_GRANITE, json_call(), before=f"{_GRANITE}[", between=", ", after="]")


GRANITE = Form(marked_json(_GRANITE, OPEN, close=CLOSE), _granite_frame, marks=(_GRANITE, OPEN, CLOSE))
_PHI4 = Frame(f"{_PHI}[", json_call(), before=f"{_PHI}[", between=", ", after="]")
PHI4 = Form(marked_json(_PHI, _GRANITE, close=_END_PHI), _PHI4, marks=(_GRANITE, _END_PHI))


def _separated(read: Reader) -> Script[None]:
    while True:
        yield from json_calls(read, known=True)
        if (yield from read.one_of(";", spaced=True)) is None:
            return


_LLAMA3 = Frame("", json_call(arguments="parameters"), between="; ")
LLAMA3 = Form(whole_or_marked(_LLAMA, _separated), _LLAMA3, marks=(_LLAMA,))
