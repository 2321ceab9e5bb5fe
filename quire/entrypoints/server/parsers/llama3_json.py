"""Llama 3's format: the whole answer is a JSON object with name and parameters; `<|python_tag|>` may come before it.

An answer that merely is JSON stays one: only the names of tools on offer make a call.
"""

from quire.entrypoints.server.parsers.calls import json_calls
from quire.entrypoints.server.parsers.forms import Form, Frame, json_call
from quire.entrypoints.server.parsers.reader import Reader, Script

_TAG = "<|python_tag|>"


def _script(read: Reader) -> Script[None]:
    with read.attempt(None):
        yield from read.space()
        yield from read.one_of(_TAG)
        yield from _calls(read)
    while mark := (yield from read.text(_TAG)):
        with read.attempt(mark):
            yield from _calls(read)


def _calls(read: Reader) -> Script[None]:
    while True:
        yield from json_calls(read, known=True)
        yield from read.space()
        if (yield from read.one_of(";")) is None:
            return


FORM = Form(_script, Frame("", json_call(arguments="parameters"), between="; "), marks=(_TAG,))
