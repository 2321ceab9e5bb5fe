"""What a format of tool calls is: the script that reads it, and the frame by which a grammar makes a model write it.

Each format is a `Form`; `registry` lists them. The functions here describe one call in the ways that formats
have: JSON with the name within, a name and JSON, tags, keywords. They know nothing of requests and tokenizers.
"""

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from quire.entrypoints.server.parsers.base import Function
from quire.entrypoints.server.parsers.calls import to_json, types_of
from quire.entrypoints.server.parsers.reader import Reads
from quire.text.grammars.lark import Lark

_NAMES_MORE = {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if"}
WriteCall = Callable[[Lark, Function], str]  # the expression of one call of a function


class Frame(Struct, frozen=True):
    """How calls are written, as a grammar has it.

    Attributes:
        trigger: what a call begins with, after which text can't go on; "" where only a whole answer is a call.
        call: one call.
        before, between, after: around all of them.
        single: an answer has one call at most.
    """

    trigger: str
    call: WriteCall
    before: str = ""
    between: str = ""
    after: str = ""
    single: bool = False


class Form(Struct, frozen=True):
    """A format of tool calls.

    Attributes:
        script: reads it.
        frame: how it is written, or what says so of a chat template; None where no grammar can hold it.
        marks: texts of it that may be tokens of their own.
    """

    script: Reads
    frame: Frame | Callable[[str], Frame]
    marks: tuple[str, ...] = ()

    def frame_for(self, template: str) -> Frame:
        """How calls are written by a model that has this chat template."""
        return self.frame if isinstance(self.frame, Frame) else self.frame(template)


def schema_of(function: Function) -> dict[str, Any]:
    """The schema of a function's arguments: an object, which has none where it says that there are none."""
    schema = {"type": "object", **function.parameters}
    if schema.get("properties") == {} and not schema.get("required") and not _NAMES_MORE & schema.keys():
        schema["additionalProperties"] = False
    return schema


def json_call(begin: str = "", end: str = "", arguments: str = "arguments") -> WriteCall:
    """`{"name": ..., "arguments": {...}}` between two texts."""

    def write(lark: Lark, function: Function) -> str:
        head = lark.text(f'{begin}{{"name": {to_json(function.name)}, "{arguments}": ')
        return f"{head} {lark.json(schema_of(function))} {lark.text('}' + end)}"

    return write


def named_call(begin: str, middle: str, end: str, between_regex: str = "", then: str = "") -> WriteCall:
    """The name between two texts, and then the arguments as JSON; after the name may come what a regex allows."""

    def write(lark: Lark, function: Function) -> str:
        regex = f"/{between_regex}/" if between_regex else ""
        parts = [lark.text(begin + function.name + middle), regex, lark.text(then)]
        return " ".join(filter(None, [*parts, lark.json(schema_of(function)), lark.text(end)]))

    return write


def tagged_call(name: tuple[str, str], argument: tuple[str, str, str], end: str) -> WriteCall:
    """Arguments between tags: text as it is, all else as JSON.

    Args:
        name: what comes before and after the name; argument: before a key, between key and value, after the value.
    """
    opening, middle, closing = argument

    def value(lark: Lark, schema: dict[str, Any], is_text: bool) -> str:
        return _string(lark, schema, closing) if is_text else f"{lark.json(schema)} {lark.text(closing)}"

    return _listed_call(name, (opening, middle, ""), end, value)


def keyword_call() -> WriteCall:
    """`name(key=value, ...)`, values as JSON."""

    return _listed_call(("", "("), ("", "=", ", "), ")", lambda lark, schema, is_text: lark.json(schema))


def braced_call(begin: str, end: str, quote: str) -> WriteCall:
    """`name{key:value,...}` between two texts; text between marks, all else as JSON."""

    def value(lark: Lark, schema: dict[str, Any], is_text: bool) -> str:
        return f"{lark.text(quote)} {_string(lark, schema, quote)}" if is_text else lark.json(schema)

    return _listed_call((begin, "{"), ("", ":", ","), "}" + end, value)


def _listed_call(
    name: tuple[str, str], argument: tuple[str, str, str], end: str, value: Callable[[Lark, dict[str, Any], bool], str]
) -> WriteCall:
    """Arguments one after another.

    Args:
        argument: what comes before a key, between key and value, and between arguments.
        value: writes one, by its schema, and whether that has it be text.
    """
    opening, middle, between = argument

    def write(lark: Lark, function: Function) -> str:
        types = types_of(function)
        items = [
            (f"{lark.text(opening + key + middle)} {value(lark, schema, types.get(key) == {'string'})}", needed)
            for key, schema, needed in _arguments(function)
        ]
        series = lark.series(items, between) if items else ""
        return " ".join(filter(None, [lark.text(name[0] + function.name + name[1]), series, lark.text(end)]))

    return write


def _string(lark: Lark, schema: dict[str, Any], end: str) -> str:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and all(isinstance(value, str) for value in values):
        return "(" + " | ".join(lark.text(value + end) for value in values) + ")"
    return lark.until(end)


def _arguments(function: Function) -> list[tuple[str, dict[str, Any], bool]]:
    """(name, schema, whether it is needed) of each; definitions go with each schema."""
    schema = function.parameters
    properties, needed = schema.get("properties") or {}, schema.get("required")
    needed = needed if isinstance(needed, list) else ()
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return [
        (key, {**shared, **(one if isinstance(one, dict) else {})}, key in needed) for key, one in properties.items()
    ]
