"""Kimi K2's format: a section of calls, each with an id that holds the name, as `functions.NAME:0`."""

from quire.entrypoints.server.parsers.calls import marked
from quire.entrypoints.server.parsers.forms import Form, Frame, named_call
from quire.entrypoints.server.parsers.reader import MAX_NAME, Reader, Script

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_BEGIN, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def _call(read: Reader, _: str) -> Script[None]:
    text, _ = yield from read.until(_ARGUMENTS, most=MAX_NAME)
    id = text.strip()
    read.start(id.removeprefix("functions.").partition(":")[0], id)
    yield from read.arguments()
    yield from read.literal(_END, spaced=True)


_WRITTEN = named_call(f"{_BEGIN}functions.", "", _END, between_regex=":[0-9]{1,3}", then=_ARGUMENTS)
FORM = Form(
    marked(_call, _BEGIN, around=(_SECTION, _SECTION_END)),
    Frame(_SECTION, _WRITTEN, before=_SECTION, after=_SECTION_END),
    marks=(_SECTION, _SECTION_END, _BEGIN, _ARGUMENTS, _END),
)
