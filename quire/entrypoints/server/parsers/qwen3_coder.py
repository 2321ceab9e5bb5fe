"""Qwen3-Coder's format: tags for the function and for each parameter, whose value is written between them."""

from quire.entrypoints.server.parsers.calls import ArgumentWriter
from quire.entrypoints.server.parsers.forms import Form, Frame, tagged_call
from quire.entrypoints.server.parsers.json_formats import CLOSE, OPEN
from quire.entrypoints.server.parsers.reader import MAX_NAME, Reader, Script

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_END_FUNCTION, _END_PARAMETER = "</function>", "</parameter>"


def _script(read: Reader) -> Script[None]:
    while mark := (yield from read.text(OPEN, _FUNCTION)):
        with read.attempt(mark):
            if mark == OPEN:
                yield from read.space()
                yield from read.literal(_FUNCTION)
            name, _ = yield from read.until(">", most=MAX_NAME)
            read.start(name.strip())
            yield from _parameters(read, ArgumentWriter(read, name.strip()))
            read.end()
            yield from read.space()
            yield from read.one_of(CLOSE)


def _parameters(read: Reader, writer: ArgumentWriter) -> Script[None]:
    while True:
        yield from read.space()
        if (yield from read.one_of(_PARAMETER)) is None:
            break
        key, _ = yield from read.until(">", most=MAX_NAME)
        yield from read.one_of("\n")
        if writer.wants_text(key):
            yield from writer.text_pieces(key, _END_PARAMETER, hold="\n")
        else:
            text, _ = yield from read.until(_END_PARAMETER)
            writer.written(key, text)
    writer.close()
    yield from read.literal(_END_FUNCTION)


FORM = Form(
    _script,
    Frame(
        OPEN,
        tagged_call(
            (f"{OPEN}\n{_FUNCTION}", ">\n"), (_PARAMETER, ">\n", f"\n{_END_PARAMETER}\n"), f"{_END_FUNCTION}\n{CLOSE}"
        ),
        between="\n",
    ),
    marks=(OPEN, CLOSE),
)
