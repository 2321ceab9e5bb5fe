"""DeepSeek's formats: each call between marks, its arguments in a fence (V3) or plain (V3.1)."""

from quire.entrypoints.server.parsers.calls import marked
from quire.entrypoints.server.parsers.forms import Form, Frame, named_call
from quire.entrypoints.server.parsers.reader import MAX_NAME, Reader, Script

_ALL_BEGIN, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE = "```"


def _call(read: Reader, _: str) -> Script[None]:
    name, _ = yield from read.until(_SEP, most=MAX_NAME)
    yield from read.space()
    if fenced := (yield from read.peek(1)) != "{":  # what came first was the kind of tool
        name, _ = yield from read.until("\n", most=MAX_NAME)
        yield from read.literal(f"{_FENCE}json")
    read.start(name.strip())
    yield from read.arguments()
    if fenced:
        yield from read.literal(_FENCE, spaced=True)
    yield from read.literal(_END, spaced=True)


def _frame(template: str) -> Frame:
    if f"{_FENCE}json" in template:
        call = named_call(f"{_BEGIN}function{_SEP}", f"\n{_FENCE}json\n", f"\n{_FENCE}{_END}")
        return Frame(_ALL_BEGIN, call, before=_ALL_BEGIN, between="\n", after=_ALL_END)
    return Frame(_ALL_BEGIN, named_call(_BEGIN, _SEP, _END), before=_ALL_BEGIN, after=_ALL_END)


_AROUND = (_ALL_BEGIN, _ALL_END)
FORM = Form(marked(_call, _BEGIN, around=_AROUND), _frame, marks=(*_AROUND, _BEGIN, _SEP, _END))
