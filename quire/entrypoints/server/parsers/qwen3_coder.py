"""Qwen3-Coder's format: tags for the function and for each parameter, whose value is written between them."""

from quire.entrypoints.server.parsers.calls import ArgumentWriter, marked
from quire.entrypoints.server.parsers.forms import Form, Frame, tagged_call
from quire.entrypoints.server.parsers.json_formats import CLOSE, OPEN
from quire.entrypoints.server.parsers.reader import MAX_NAME, Reader, Script

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_END_FUNCTION, _END_PARAMETER = "</function>", "</parameter>"


def _call(read: Reader, mark: str) -> Script[None]:
    if mark == OPEN:
        yield from read.literal(_FUNCTION, spaced=True)
    name, _ = yield from read.until(">", most=MAX_NAME)
    writer = ArgumentWriter(read, name.strip())
    while (yield from read.one_of(_PARAMETER, spaced=True)):
        key, _ = yield from read.until(">", most=MAX_NAME)
        yield from read.one_of("\n")
        yield from writer.argument(key, _END_PARAMETER, hold="\n")
    writer.close()
    yield from read.literal(_END_FUNCTION)
    yield from read.one_of(CLOSE, spaced=True)


_TAGS = (_PARAMETER, ">\n", f"\n{_END_PARAMETER}\n")
_WRITTEN = tagged_call((f"{OPEN}\n{_FUNCTION}", ">\n"), _TAGS, f"{_END_FUNCTION}\n{CLOSE}")
FORM = Form(marked(_call, OPEN, _FUNCTION), Frame(OPEN, _WRITTEN, between="\n"), marks=(OPEN, CLOSE))
