"""GLM 4's format: the name after `<tool_call>`, then keys and values between tags of their own."""

from quire.entrypoints.server.parsers.calls import ArgumentWriter
from quire.entrypoints.server.parsers.forms import Form, Frame, tagged_call
from quire.entrypoints.server.parsers.json_formats import CLOSE, OPEN
from quire.entrypoints.server.parsers.reader import MAX_NAME, Reader, Script

_KEY, _END_KEY, _VALUE, _END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def _script(read: Reader) -> Script[None]:
    while mark := (yield from read.text(OPEN)):
        with read.attempt(mark):
            name, mark = yield from read.until(_KEY, CLOSE, most=MAX_NAME)
            read.start(name.strip())
            writer = ArgumentWriter(read, name.strip())
            while mark == _KEY:
                yield from _argument(read, writer)
                yield from read.space()
                mark = yield from read.one_of(_KEY)
            writer.close()
            read.end()
            yield from read.one_of(CLOSE)


def _argument(read: Reader, writer: ArgumentWriter) -> Script[None]:
    key, _ = yield from read.until(_END_KEY, most=MAX_NAME)
    yield from read.space()
    yield from read.literal(_VALUE)
    if writer.wants_text(key.strip()):
        yield from writer.text_pieces(key.strip(), _END_VALUE)
    else:
        text, _ = yield from read.until(_END_VALUE)
        writer.written(key.strip(), text)


def _frame(template: str) -> Frame:
    line = "\n" if f"{OPEN}{{function-name}}\n" in template or f"{OPEN}{{function-name}}\\n" in template else ""
    tags = (_KEY, f"{_END_KEY}{line}{_VALUE}", f"{_END_VALUE}{line}")
    return Frame(OPEN, tagged_call((OPEN, line), tags, CLOSE), between=line)


FORM = Form(_script, _frame, marks=(OPEN, CLOSE, _KEY, _END_KEY, _VALUE, _END_VALUE))
