"""A chat request's tools: which there are, which may be called, and whether one has to be.

The chat dialect calls it; others bring their own form into this one's. Errors name the field. What models and grammars
make of an `Offer` is `parsing`'s matter.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from quire.entrypoints.server.errors import quote
from quire.entrypoints.server.parsers.base import Function, Offer
from quire.entrypoints.server.requests_common import wrong
from quire.errors import InvalidRequestError

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_CHOICES = "'none', 'auto', 'required', or an object that names a function or a list of allowed_tools"


def read_offer(tools: Sequence[Any] | None, tool_choice: Any, parallel: bool | None) -> Offer | None:
    """The tools of a chat request; None where it has none.

    Args:
        tools: `{"type": "function", "function": {"name", "parameters", "strict"}}` each.
        tool_choice: "none", "auto", "required", `{"type": "function", "function": {"name"}}`, or
            `{"type": "allowed_tools", "allowed_tools": {"mode", "tools"}}`.
        parallel: whether several calls in one answer are allowed; yes by default.

    Raises:
        InvalidRequestError: one of them is of another form, two tools have one name, or the choice names no tool.
    """
    functions = tuple(_function(tool, f"tools[{place}]") for place, tool in enumerate(tools or ()))
    parallel, names = parallel is not False, [function.name for function in functions]
    for name, count in Counter(names).items():
        if count > 1:
            raise InvalidRequestError(f"tools: two of them are called {name!r}; give each a name of its own.", "tools")
    if not functions:
        if tool_choice not in (None, "none", "auto"):  # agents say "auto" beside an empty list
            raise InvalidRequestError("tool_choice needs tools, and there are none; leave it out.", "tool_choice")
        return None
    if tool_choice in (None, "auto", "none", "required"):
        return Offer(functions, tool_choice or "auto", None, parallel)
    kind = tool_choice.get("type") if isinstance(tool_choice, dict) else None
    if kind == "function":
        return Offer(functions, "required", _named(tool_choice, names, "tool_choice"), parallel)
    given = tool_choice.get("allowed_tools") if kind == "allowed_tools" else None
    if not isinstance(given, dict) or given.get("mode") not in ("auto", "required"):
        raise wrong("tool_choice", _CHOICES, tool_choice)
    listed = given.get("tools")
    if not isinstance(listed, list) or not listed:
        raise InvalidRequestError("tool_choice.allowed_tools.tools must be a list of tools.", "tool_choice")
    allowed = {_named(tool, names, "tool_choice.allowed_tools") for tool in listed}
    chosen = tuple(function for function in functions if function.name in allowed)
    return Offer(chosen, given["mode"], None, parallel, closed=len(chosen) < len(functions))


def _function(tool: Any, where: str) -> Function:
    kind = tool.get("type", "function") if isinstance(tool, dict) else None
    if kind != "function":
        reason = f"of type {quote(kind)}" if isinstance(kind, str) else quote(tool)
        raise InvalidRequestError(f"{where} is {reason}; only the type 'function' is supported.", "tools")
    given = tool.get("function")
    if not isinstance(given, dict):
        raise InvalidRequestError(f"{where}.function must be an object with name and parameters.", "tools")
    name = given.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong(f"{where}.function.name", "1 to 128 letters, digits, or any of '_.:/-'", name, "tools")
    # Without any, a function has none, as OpenAI has it; the schema {} would allow all.
    schema = {"properties": {}} if given.get("parameters") is None else given["parameters"]
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise InvalidRequestError(f"{where}: the parameters of {name!r} must be a JSON schema of an object.", "tools")
    if not isinstance(schema.get("properties", {}), dict):
        raise InvalidRequestError(f"{where}: the properties of {name!r} must be an object.", "tools")
    if type(strict := given.get("strict")) not in (bool, type(None)):
        raise InvalidRequestError(f"{where}: strict of {name!r} must be true, false or null.", "tools")
    return Function(name, schema, bool(strict), where)


def _named(tool: Any, names: Sequence[str], where: str) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else tool.get("name") if isinstance(tool, dict) else None
    if not isinstance(name, str) or name not in names:
        there = ", ".join(map(repr, names[:20]))
        raise InvalidRequestError(f"{where} names {quote(name)}, which is none of the tools: {there}.", "tool_choice")
    return name
