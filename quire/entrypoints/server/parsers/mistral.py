"""Mistral's formats: `[TOOL_CALLS]` and a JSON list of calls, or in newer models a name, `[ARGS]` and the arguments.

Mistral's templates take ids of nine letters and digits only.
"""

from quire.entrypoints.server.parsers.calls import json_calls
from quire.entrypoints.server.parsers.forms import Form, Frame, json_call, named_call
from quire.entrypoints.server.parsers.reader import MAX_NAME, Reader, Script

_MARK, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def _script(read: Reader) -> Script[None]:
    new_id = read.new_id
    read.new_id = lambda: new_id()[-9:]
    while mark := (yield from read.text(_MARK)):
        with read.attempt(mark):
            yield from read.space()
            if (yield from read.peek(1)) in ("[", "{"):
                yield from json_calls(read)
            else:
                yield from _named_call(read)


def _named_call(read: Reader) -> Script[None]:
    name, mark = yield from read.until(_ARGS, _ID, "{", most=MAX_NAME)
    id = (yield from read.until(_ARGS, most=MAX_NAME))[0].strip() if mark == _ID else None
    read.start(name.strip(), id)
    if mark == "{":
        read.put_back(mark)
    yield from read.arguments()


def _frame(template: str) -> Frame:
    if _ID in template:
        return Frame(_MARK, named_call(_MARK, _ID, "", between_regex="[a-zA-Z0-9]{9}", then=_ARGS))
    if _ARGS in template:
        return Frame(_MARK, named_call(_MARK, _ARGS, ""))
    if f"{_MARK}[" in template or '"[TOOL_CALLS] ["' in template:
        return Frame(_MARK, json_call(), before=f"{_MARK}[", between=", ", after="]")
    return Frame(_MARK, named_call(_MARK, "", ""))


FORM = Form(_script, _frame, marks=(_MARK, _ARGS, _ID))
