"""Formats that have a call's name between marks, and its arguments after it as JSON.

DeepSeek's, with the arguments in a fence (V3) or plain (V3.1). Kimi K2's: a section of calls, each with an id that
holds the name, as `functions.NAME:0`. Mistral's: `[TOOL_CALLS]` and a JSON list of calls, or in newer models a name,
`[ARGS]` and the arguments; its templates take ids of nine letters and digits only.
"""

from quire.entrypoints.server.parsers.calls import json_calls, marked
from quire.entrypoints.server.parsers.forms import Form, Frame, json_call, named_call
from quire.entrypoints.server.parsers.json_script import arguments
from quire.entrypoints.server.parsers.reader import MAX_NAME, Reader, Script

_AROUND = _CALLS, _END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE = "```"


def _deepseek_call(read: Reader, _: str) -> Script[None]:
    name, _ = yield from read.until(_SEP, most=MAX_NAME)
    yield from read.space()
    if fenced := (yield from read.peek()) != "{":  # what came first was the kind of tool
        name, _ = yield from read.until("\n", most=MAX_NAME)
        yield from read.literal(f"{_FENCE}json")
    read.start(name.strip())
    yield from arguments(read)
    if fenced:
        yield from read.literal(_FENCE, spaced=True)
    yield from read.literal(_END_CALL, spaced=True)


def _deepseek_frame(template: str) -> Frame:
    if f"{_FENCE}json" in template:
        call = named_call(f"{_CALL}function{_SEP}", f"\n{_FENCE}json\n", f"\n{_FENCE}{_END_CALL}")
        return Frame(_CALLS, call, before=_CALLS, between="\n", after=_END_CALLS)
    return Frame(_CALLS, named_call(_CALL, _SEP, _END_CALL), before=_CALLS, after=_END_CALLS)


_DEEPSEEK_MARKS = (*_AROUND, _CALL, _SEP, _END_CALL)
DEEPSEEK = Form(marked(_deepseek_call, _CALL, around=_AROUND), _deepseek_frame, marks=_DEEPSEEK_MARKS)

_SECTION, _END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI, _ARGUMENTS, _END_KIMI = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def _kimi_call(read: Reader, _: str) -> Script[None]:
    text, _ = yield from read.until(_ARGUMENTS, most=MAX_NAME)
    id = text.strip()
    read.start(id.removeprefix("functions.").partition(":")[0], id)
    yield from arguments(read)
    yield from read.literal(_END_KIMI, spaced=True)


_KIMI_WRITTEN = named_call(f"{_KIMI}functions.", "", _END_KIMI, between_regex=":[0-9]{1,3}", then=_ARGUMENTS)
KIMI_K2 = Form(
    marked(_kimi_call, _KIMI, around=(_SECTION, _END_SECTION)),
    Frame(_SECTION, _KIMI_WRITTEN, before=_SECTION, after=_END_SECTION),
    marks=(_SECTION, _END_SECTION, _KIMI, _ARGUMENTS, _END_KIMI),
)

_MISTRAL, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def _mistral_script(read: Reader) -> Script[None]:
    new_id = read.new_id
    read.new_id = lambda: new_id()[-9:]
    yield from marked(_mistral_call, _MISTRAL)(read)


def _mistral_call(read: Reader, _: str) -> Script[None]:
    yield from read.space()
    if (yield from read.peek()) in ("[", "{"):
        return (yield from json_calls(read))
    name, mark = yield from read.until(_ARGS, _ID, "{", most=MAX_NAME)
    id = (yield from read.until(_ARGS, most=MAX_NAME))[0].strip() if mark == _ID else None
    read.start(name.strip(), id)
    if mark == "{":
        read.put_back(mark)
    yield from arguments(read)


def _mistral_frame(template: str) -> Frame:
    if _ID in template:
        return Frame(_MISTRAL, named_call(_MISTRAL, _ID, "", between_regex="[a-zA-Z0-9]{9}", then=_ARGS))
    if _ARGS in template:
        return Frame(_MISTRAL, named_call(_MISTRAL, _ARGS, ""))
    if f"{_MISTRAL}[" in template or '"[TOOL_CALLS] ["' in template:
        return Frame(_MISTRAL, json_call(), before=f"{_MISTRAL}[", between=", ", after="]")
    return Frame(_MISTRAL, named_call(_MISTRAL, "", ""))


MISTRAL = Form(_mistral_script, _mistral_frame, marks=(_MISTRAL, _ARGS, _ID))
