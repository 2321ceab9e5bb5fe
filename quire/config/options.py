"""How options are declared and checked: a field's type, its default, its help text, its range, all in one place.

`EngineArgs`, `ServerArgs` and the load generator's `LoadArgs` are dataclasses of `option` fields that call
`check_options` when they are made; `quire.entrypoints.cli.flags` makes flags of them. Must not know any one option.
"""

import dataclasses
import os
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from quire.errors import ConfigError
from quire.utils.suggest import hint
from quire.utils.values import plain

_FORMS = {bool: "True or False", str: "a text", list: "a list of texts", dict: "an object of keys and values"}
Options = TypeVar("Options")  # a dataclass of options
_hints = cache(typing.get_type_hints)
UNLIMITED = 2.0**62  # a number beyond it is no number that an option means; inf only where it is said


def option(
    default: Any, least: float = -UNLIMITED, most: float = UNLIMITED, *, secret: bool = False, **facts: Any
) -> Any:
    """A field of a dataclass of options; the docstring below it is its documentation, and its flag's text.

    Args:
        least, most: the range of a number, both ends included. `over` among the facts leaves its end out.
        secret: not shown by repr.
        facts: further metadata, for the class itself. `aliases` among them: vLLM's other names for it; `short`: its
            flag of one dash; `expands`: a path that may begin with ~; `unset`: a number that means None.
    """
    metadata = {"least": least, "most": most, "over": None} | facts
    made: dict[str, Any] = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return dataclasses.field(**made, metadata=metadata, repr=not secret)


def read_options(kind: type[Options], given: Mapping[str, Any], owner: str) -> Options:
    """The options of a class from an object of JSON, which came as one option, `owner`.

    Raises:
        ConfigError: an unknown name, or a bad value; the message begins with the owner.
    """
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            remedy = hint(str(name), known, f"There are {', '.join(known)}.")
            raise ConfigError(f"{owner} has no option {name!r}. {remedy}")
    try:
        return kind(**given)
    except ConfigError as error:
        raise ConfigError(f"{owner}: {error}") from None


def option_of(options: type, name: str) -> Any:
    """The same option as another class of options has."""
    found = next(field for field in dataclasses.fields(options) if field.name == name)
    return dataclasses.field(default=found.default, metadata={**found.metadata, "of": options}, repr=found.repr)


def split_optional(hint: Any) -> tuple[Any, bool]:
    """A type without its None, and whether it had one."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
        return kinds[0], len(kinds) < len(typing.get_args(hint))
    return hint, False


def choices_of(hint: Any) -> tuple[Any, ...]:
    """The values that a Literal, or a Literal or None, allows; empty for other types."""
    kind, optional = split_optional(hint)
    return (None,) * optional + typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


def check_options(options: Any) -> None:
    """Hold every field of a dataclass of options against its type and range; those of numpy become Python's.

    Raises:
        ConfigError: the message names the option, the value and what is allowed.
    """
    hints = _hints(type(options))
    for field in dataclasses.fields(options):
        facts, value = field.metadata, plain(getattr(options, field.name))
        name = "/".join((field.name, *facts.get("aliases", ())))  # which of them was given, nobody knows
        vars(options)[field.name] = value = None if type(value) is int and value == facts.get("unset") else value
        kind, optional = split_optional(hints[field.name])
        if value is None and optional:
            continue
        got = repr(value) if field.repr else f"a {type(value).__name__}"
        if choices := choices_of(hints[field.name]):
            if isinstance(value, bool) or not isinstance(value, str | int) or value not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
        elif (form := typing.get_origin(kind) or kind) in _FORMS:
            if not isinstance(value, form):
                raise ConfigError(f"{name} must be {_FORMS[form]}, got {got}.")
            if isinstance(value, str) and "\0" in value:
                raise ConfigError(f"{name} has a NUL character, which no name and no file has: {got}.")
            if facts.get("expands") and os.path.expanduser(str(value)).startswith("~"):
                raise ConfigError(f"{field.name}: {value!r} is in a home that nobody has; give the whole path.")
        elif kind in (int, float):
            check_number(name, value, kind, facts["least"], facts["most"], facts["over"])


def check_kind(name: str, value: Any, kind: type) -> None:
    """Refuse what is no object of a class. Raises ConfigError."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be {kind.__name__}(...), got {value!r:.80}.")


def check_number(
    name: str, value: Any, kind: type, least: float = -UNLIMITED, most: float = UNLIMITED, over: float | None = None
) -> None:
    """Refuse what is no number of its kind (a bool is none), or is out of its range."""
    fits = not isinstance(value, bool) and isinstance(value, int if kind is int else int | float)
    if fits and least <= value <= most and (over is None or value > over):
        return
    lowest = f"over {over:g}" if over is not None else f"at least {least:g}" if least > -UNLIMITED else ""
    bounds = [lowest] * bool(lowest) + [f"at most {most:g}"] * (most < UNLIMITED)
    if len(bounds) == 2 and over is None:
        bounds = [f"from {least:g} to {most:g}"]
    what = "an integer" if kind is int else "a number"
    raise ConfigError(f"{name} must be {', '.join([what, *bounds])}, got {value!r}.")
