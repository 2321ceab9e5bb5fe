"""Jinja for chat templates: the names that Hugging Face's templates expect, in a sandbox with bounds on time and size.

`chat_template` compiles and renders through it; it knows nothing of messages. Bounds, all within this process: CPU
time is checked in every loop pass and call, sizes before text, lists or numbers are made, and the output as it grows.
What remains: no check ends a single step of C code once it runs (comparing lists that hold one another many times
over, say), so a server that takes templates from strangers renders them in a process that it can kill.
"""

import functools
import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from types import BuiltinMethodType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.utils
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS = 5.0  # CPU time of the rendering thread
MAX_CHARS = 1 << 24  # of any one text, and of the output
MAX_ITEMS = 1 << 18  # of any one list, with what its elements hold
MAX_MADE = 1 << 29  # characters of all texts, and 32 for each list element, that a rendering makes on its way
MAX_WIDTH = 100_000  # of a padding, an indent, a batch
MAX_BITS = 4096  # of an integer
_WIDE_PERCENT = re.compile(r"%(\([^)]*\))?[-+ #0]*(\*|\d{5,}|\d*\.(\*|\d{5,}))")
_WIDE_BRACES = re.compile(r":[^}]*(\d{5,}|\{)")


class TemplateLimitError(jinja2.TemplateRuntimeError):
    """A template went over a bound of time or size."""


class _Budget(threading.local):
    """What the rendering in this thread has used."""

    end = math.inf  # of the thread's CPU time
    ticks = 0
    made = 0


_budget = _Budget()


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment; one serves all templates and threads."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
            finalize=lambda value: value if isinstance(value, str) else _measured(value),
        )
        self.code_generator_class = _BoundedCode
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        del self.globals["lipsum"]
        self.filters["tojson"] = _tojson
        for name, function in list(self.filters.items()):
            self.filters[name] = _guarded(function, _FILTER_GUARDS.get(name))

    def run(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """Render within the bounds.

        Raises:
            TemplateLimitError: over a bound; or whatever else the template raises.
        """
        _budget.end, _budget.ticks, _budget.made = time.thread_time() + MAX_SECONDS, 0, 0
        return template.render(variables)

    def tick(self) -> None:
        """A step of the template: called in each pass of a loop."""
        _tick()

    def concat(self, parts: Iterable[str]) -> str:  # type: ignore[override]
        """Join output, as long as it is not too much."""
        kept: list[str] = []
        length = 0
        for part in parts:
            length += len(part)
            if length > MAX_CHARS:
                break
            kept.append(part)
        _charge(length, MAX_CHARS)
        return "".join(kept)

    def join_text(self, values: tuple[Any, ...]) -> str:
        """The `~` operator."""
        return self.concat(v if isinstance(v, str) else str(_measured(v)) for v in values)

    def cut(self, value: Any, part: slice) -> Any:
        """A slice, which is a copy."""
        return _made(value[part])

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _tick()
        owner = getattr(__obj, "__self__", None) if isinstance(__obj, BuiltinMethodType) else None
        if isinstance(owner, str | bytes | int):
            args = tuple(map(_listed, args))
            _guard_method(owner, __obj.__name__, (*args, *kwargs.values()))
        return _made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _charge_copy(left, len(left) + len(right))
        elif operator == "*":
            for a, b in ((left, right), (right, left)):
                if isinstance(a, str | bytes | list | tuple) and isinstance(b, int):
                    _charge_copy(a, len(a) * b)
            if isinstance(left, int) and isinstance(right, int):
                _check(left.bit_length() + right.bit_length(), MAX_BITS)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check(left.bit_length() * right, MAX_BITS)
        elif operator == "%" and isinstance(left, str):
            _guard_percent(left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_BRACES.search(value.__self__):
            raise TemplateLimitError("a format has a width that is too large, or nested")
        return wrapped


class _BoundedCode(CodeGenerator):
    """Compiles a tick into every loop body, and `~` into a call with a bound."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        if frame.loop_frame:
            self.writeline("environment.tick()")
        super().blockvisit(nodes, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_text((")
        for arg in node.nodes:
            self.visit(arg, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.cut(")
        self.visit(node.node, frame)
        for place, bound in enumerate((node.arg.start, node.arg.stop, node.arg.step)):
            self.write(", " if place else ", slice(")
            self.visit(bound, frame) if bound is not None else self.write("None")
        self.write("))")


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's text for training; here it is just its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` as a function, without the class behind it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` that holds no name beginning with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace can't hold {name!r}, which begins with an underscore")


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > 200 or re.search(r"\d{4,}", format):
        raise TemplateLimitError("a time format is too long")
    return datetime.now().strftime(format)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML."""
    _measured(value)
    _check(indent if isinstance(indent, int) else len(indent or ""), MAX_WIDTH // 1000)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _check(size: int, limit: int) -> None:
    if size > limit:
        raise TemplateLimitError(f"it makes something larger than the limit of {limit}")


def _tick() -> None:
    """Count a step, and look at the clock now and then."""
    _budget.ticks += 1
    if not _budget.ticks % 8 and time.thread_time() > _budget.end:
        raise TemplateLimitError(f"it ran for more than {MAX_SECONDS:g} s")


def _charge(size: int, limit: int, weight: int = 1) -> None:
    """Something of this size is about to be made, or has just been."""
    _check(size, limit)
    _budget.made += size * weight
    _check(_budget.made, MAX_MADE)


def _charge_copy(value: Any, size: int) -> None:
    _charge(size, MAX_CHARS) if isinstance(value, str) else _charge(size, MAX_ITEMS, 32)


def _made(value: Any) -> Any:
    if isinstance(value, str | list | tuple | bytes | dict):
        _charge_copy(value, len(value))
    return value


def _measured(value: Any) -> Any:
    """The value, once it is known how large it is with everything inside it, counted as often as it occurs."""
    num_items = num_chars = 0
    stack = [value]
    while stack:
        item = stack.pop()
        num_items += 1
        if isinstance(item, str):
            num_chars += len(item)
            _check(num_chars, MAX_CHARS)
        elif isinstance(item, list | tuple):
            _check(num_items + len(item), MAX_ITEMS)
            stack.extend(item)
        elif isinstance(item, Mapping):
            _check(num_items + 2 * len(item), MAX_ITEMS)
            stack.extend(item)
            stack.extend(item.values())
    return value


def _guard_percent(text: str, values: Any) -> None:
    if _WIDE_PERCENT.search(text):
        raise TemplateLimitError("a format has a width that is too large, or not fixed")
    _measured(values)


def _guard_replace(text: Any, old: Any = "", new: Any = "", *_: Any) -> None:
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        _check(len(text) + text.count(old) * (len(new) - len(old)), MAX_CHARS)


def _guard_join(parts: Any, separator: Any = "", *_: Any) -> None:
    _measured(parts)
    _check(len(parts) * (len(separator) + 1), MAX_CHARS)


def _guard_widths(_: Any, *args: Any) -> None:
    for width in args:
        _check(width if isinstance(width, int) else len(width) if isinstance(width, str) else 0, MAX_WIDTH)


def _guard_text(text: Any, *args: Any) -> None:
    """Filters that copy the rest of the text for each thing that they find in it."""
    _check(len(text) if isinstance(text, str) else 0, MAX_WIDTH)
    _guard_widths(text, *args)


def _guard_sum(values: Any, *_: Any) -> None:
    _measured(values)
    if any(isinstance(value, list | tuple) for value in values):
        _check(len(values), MAX_WIDTH // 100)  # each addition copies what there is


def _guard_method(owner: Any, name: str, args: tuple[Any, ...]) -> None:
    """Methods of text and numbers whose result may be far larger than what they are given."""
    if name == "replace":
        _guard_replace(owner, *args)
    elif name == "join":
        _guard_join(*args[:1], owner)
    elif name in ("rfind", "rindex", "rsplit", "rpartition") and args and isinstance(args[0], str):
        _check(len(owner) * len(args[0]), 1 << 30)  # unlike find, quadratic at worst
    elif name == "translate":
        raise TemplateLimitError("translate() is not available")
    elif name in ("center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"):
        _guard_widths(owner, *args)


_FILTER_GUARDS: dict[str, Callable[..., Any]] = {
    "replace": _guard_replace,
    "join": _guard_join,
    "format": lambda text, *values: _guard_percent(str(text), values),
    "sum": _guard_sum,
    **dict.fromkeys(("striptags", "urlize", "wordwrap"), _guard_text),
    **dict.fromkeys(("string", "pprint", "sort", "unique", "groupby", "xmlattr", "urlencode"), _measured),
    **dict.fromkeys(("center", "indent", "batch", "slice", "round", "truncate"), _guard_widths),
}


def _guarded(function: Callable[..., Any], guard: Callable[..., Any] | None) -> Callable[..., Any]:
    """A filter that counts as a step, looks at its value and arguments first, and counts what it makes."""
    place = 1 if hasattr(function, "jinja_pass_arg") else 0  # of the value: after the environment or context

    @functools.wraps(function)  # takes that mark along
    def checked(*args: Any, **kwargs: Any) -> Any:
        _tick()
        if guard in (_measured, _guard_join, _guard_sum):
            args = (*args[:place], _listed(args[place]), *args[place + 1 :])
        if guard is _measured:
            _measured(args[place])
        elif guard is not None:
            guard(*args[place:], *kwargs.values())
        return _made(function(*args, **kwargs))

    return checked


def _listed(value: Any) -> Any:
    """A generator's values as a list, so that they can be measured."""
    if not hasattr(value, "__next__"):
        return value
    values: list[Any] = []
    for item in value:
        _tick()
        _check(len(values), MAX_ITEMS)
        values.append(item)
    return values
