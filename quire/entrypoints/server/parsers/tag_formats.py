"""Formats whose arguments stand between tags of their own: Qwen3-Coder's and GLM 4's.

Qwen3-Coder has a tag for the function, too; GLM 4 has the name after `<tool_call>`, and tags for keys and for values.
"""

from quire.entrypoints.server.parsers.calls import ArgumentWriter, marked
from quire.entrypoints.server.parsers.forms import Form, Frame, tagged_call
from quire.entrypoints.server.parsers.json_formats import CLOSE, OPEN
from quire.entrypoints.server.parsers.reader import MAX_NAME, Reader, Script

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_END_FUNCTION, _END_PARAMETER = "</function>", "</parameter>"
_KEY, _END_KEY, _VALUE, _END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def _qwen_call(read: Reader, mark: str) -> Script[None]:
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
_QWEN = tagged_call((f"{OPEN}\n{_FUNCTION}", ">\n"), _TAGS, f"{_END_FUNCTION}\n{CLOSE}")
QWEN3_CODER = Form(marked(_qwen_call, OPEN, _FUNCTION), Frame(OPEN, _QWEN, between="\n"), marks=(OPEN, CLOSE))


def _glm_call(read: Reader, _: str) -> Script[None]:
    name, mark = yield from read.until(_KEY, CLOSE, most=MAX_NAME)
    writer = ArgumentWriter(read, name.strip())
    while mark == _KEY:
        key, _ = yield from read.until(_END_KEY, most=MAX_NAME)
        yield from read.literal(_VALUE, spaced=True)
        yield from writer.argument(key.strip(), _END_VALUE)
        mark = yield from read.one_of(_KEY, spaced=True)
    writer.close()
    yield from read.one_of(CLOSE)


def _glm_frame(template: str) -> Frame:
    line = "\n" if f"{OPEN}{{function-name}}\n" in template or f"{OPEN}{{function-name}}\\n" in template else ""
    tags = (_KEY, f"{_END_KEY}{line}{_VALUE}", f"{_END_VALUE}{line}")
    return Frame(OPEN, tagged_call((OPEN, line), tags, CLOSE), between=line)


GLM = Form(marked(_glm_call, OPEN), _glm_frame, marks=(OPEN, CLOSE, _KEY, _END_KEY, _VALUE, _END_VALUE))
