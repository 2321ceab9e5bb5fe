"""GLM 4's format: the name after `<tool_call>`, then keys and values between tags of their own."""

from quire.entrypoints.server.parsers.calls import ArgumentWriter, marked
from quire.entrypoints.server.parsers.forms import Form, Frame, tagged_call
from quire.entrypoints.server.parsers.json_formats import CLOSE, OPEN
from quire.entrypoints.server.parsers.reader import MAX_NAME, Reader, Script

_KEY, _END_KEY, _VALUE, _END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def _call(read: Reader, _: str) -> Script[None]:
    name, mark = yield from read.until(_KEY, CLOSE, most=MAX_NAME)
    writer = ArgumentWriter(read, name.strip())
    while mark == _KEY:
        key, _ = yield from read.until(_END_KEY, most=MAX_NAME)
        yield from read.literal(_VALUE, spaced=True)
        yield from writer.argument(key.strip(), _END_VALUE)
        mark = yield from read.one_of(_KEY, spaced=True)
    writer.close()
    yield from read.one_of(CLOSE)


def _frame(template: str) -> Frame:
    line = "\n" if f"{OPEN}{{function-name}}\n" in template or f"{OPEN}{{function-name}}\\n" in template else ""
    tags = (_KEY, f"{_END_KEY}{line}{_VALUE}", f"{_END_VALUE}{line}")
    return Frame(OPEN, tagged_call((OPEN, line), tags, CLOSE), between=line)


FORM = Form(marked(_call, OPEN), _frame, marks=(OPEN, CLOSE, _KEY, _END_KEY, _VALUE, _END_VALUE))
