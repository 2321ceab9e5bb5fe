"""Harmony, the format of gpt-oss: messages in channels; what it thinks is analysis, calls are commentary to a function.

The same script reads thoughts and calls, whichever of them is asked for. A stop token ends the last message.
"""

from quire.entrypoints.server.parsers.base import ReasoningDelta, TextDelta
from quire.entrypoints.server.parsers.forms import Form, Frame, named_call
from quire.entrypoints.server.parsers.json_script import arguments
from quire.entrypoints.server.parsers.reader import MAX_NAME, Reader, Script, WrongCallError
from quire.entrypoints.server.parsers.thoughts import ThoughtForm

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_TO = "to=functions."


def script(read: Reader) -> Script[None]:
    """Messages, one after another: each has a header, as `<|channel|>final`, and then its text."""
    if (yield from read.peek()) not in ("<", " "):  # no header at all
        return
    while (yield from read.peek()):
        header, mark = "", ""
        with read.attempt((yield from read.one_of(START, CHANNEL))):
            header, mark = yield from read.until(MESSAGE, *_ENDS, most=4 * MAX_NAME)
            if mark != MESSAGE:
                raise WrongCallError
            if _TO in header:
                read.start(header.partition(_TO)[2].split(CHANNEL)[0].partition(" ")[0])
                yield from arguments(read)
        if not mark:
            return
        thinks = "analysis" in header and _TO not in header
        yield from read.text(*_ENDS, START, kind=ReasoningDelta if thinks else TextDelta)
        if not thinks and _TO not in header and (yield from read.peek()):
            read.hold_spaces("\n\n")  # another message follows
        elif thinks:
            read.hold_spaces("")


_MARKS = (START, CHANNEL, MESSAGE, "<|constrain|>", *_ENDS)
_OPEN, _CLOSE, _ANSWER = f"{CHANNEL}analysis{MESSAGE}", f"<|end|>{START}assistant", f"{CHANNEL}final{MESSAGE}"
THOUGHTS = ThoughtForm((_OPEN,), (_CLOSE,), answer=_ANSWER, parts=_MARKS)  # for grammars: `script` reads them
_WRITTEN = named_call(f"{CHANNEL}commentary to=functions.", f" <|constrain|>json{MESSAGE}", "")
FORM = Form(script, Frame(CHANNEL, _WRITTEN, single=True), marks=_MARKS)
