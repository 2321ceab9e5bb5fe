"""Command-line flags made from typed fields: an engine option or a sampling parameter is declared once, elsewhere.

The subcommands call this while the parser is built, so it must stay cheap: no torch, no tokenizer. A field's type
decides how its flag is read, its help text is what `--help` shows.
"""

import argparse
import ast
import dataclasses
import inspect
import itertools
import json
import os
import re
import typing
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

from quire.config.engine_args import EngineArgs
from quire.config.options import split_optional
from quire.entrypoints.cli.files import OutputFile, OutputFolder
from quire.errors import ConfigError
from quire.utils.hub import hub_id

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def human_int(text: str) -> int:
    """A whole number, with an optional suffix: k, m, g, t are powers of 1000 and K, M, G, T powers of 1024."""
    if match := re.fullmatch(r"([+-]?\d+|\d+\.\d+(?=[kmgt]))([kmgtKMGT]?)", text):
        value = Fraction(match[1]) * _UNITS[match[2]]
        if value.denominator == 1:
            return int(value)
    raise ArgumentTypeError(f"{text!r} is not a whole number such as 4096, 4k (= 4000) or 4K (= 4096)")


def human_bytes(num_bytes: int) -> str:
    """A size, in GiB or MiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns; the first is their names, and nothing is printed where it is alone."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows if len(rows) > 1 else ():
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def positive_int(text: str) -> int:
    """`human_int`, at least 1."""
    if (value := human_int(text)) < 1:
        raise ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def add_counts(parser: ArgumentParser, *rows: tuple[str, int, str]) -> None:
    """Add flags of positive numbers: name (or several), default and what it counts, each."""
    for flag, default, what in rows:
        help_text = f"{what} (default: {default})"
        parser.add_argument(*flag.split(), type=positive_int, default=default, metavar="N", help=help_text)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentTypeError(f"not valid JSON ({error}): {text!r}") from None
    if not isinstance(value, dict):
        raise ArgumentTypeError(f"must be a JSON object such as '{{\"key\": 1}}', got {text!r}")
    return value


class ExtendList(argparse.Action):
    """Appends values, each a text or a JSON list of texts, to the list that the flag has so far."""

    def __call__(self, parser: Any, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        texts = list(getattr(namespace, self.dest, None) or [])
        for value in values:
            try:
                read = json.loads(value) if value.startswith("[") else [value]
            except (ValueError, RecursionError) as error:
                raise argparse.ArgumentError(self, f"not valid JSON ({error}): {value!r}") from None
            if not isinstance(read, list) or not all(isinstance(text, str) for text in read):
                raise argparse.ArgumentError(self, f"must be texts, or a JSON list of them, got {value!r}")
            texts += read
        setattr(namespace, self.dest, texts)


def flag_name(field_name: str) -> str:
    """`max_model_len` -> `--max-model-len`."""
    return "--" + field_name.replace("_", "-")


def add_typed_flag(
    group: argparse._ActionsContainer, name: str, hint: Any, default: Any, help_text: str, others: Iterable[str] = ()
) -> None:
    """Add the flag of one field. Where the user leaves it out, the namespace has no such attribute.

    Args:
        hint: the type: bool, int, float, str, OutputFile, OutputFolder, Literal, list[str], a dict, or one or None.
        default: shown in the help, unless it is None or a bool.
        others: further spellings of the flag.
    """
    hint, optional = split_optional(hint)
    spec: dict[str, Any]
    if typing.get_origin(hint) is typing.Literal:
        choices = list(typing.get_args(hint))
        spec = {"choices": choices, "type": type(choices[0])}
    elif typing.get_origin(hint) is list:
        spec = {"action": ExtendList, "nargs": "+", "metavar": "TEXT"}
        default = json.dumps(default) if default else None
    elif hint is bool:
        spec = {"action": argparse.BooleanOptionalAction}
        help_text += f" (on by default: {flag_name('no_' + name)} turns it off)" if default else ""
    else:
        readers: dict[Any, tuple[Any, str]] = {float: (float, "X"), str: (str, "TEXT")}
        readers |= {int: (lambda text: None if optional and text == "auto" else human_int(text), "N")}
        readers |= {dict: (json_object, "JSON"), OutputFile: (OutputFile, "FILE"), OutputFolder: (OutputFolder, "DIR")}
        reader, metavar = readers[typing.get_origin(hint) or hint]
        spec = {"type": reader, "metavar": metavar}
    if default not in (None, "") and hint is not bool:
        help_text += f" (default: {default})"
    group.add_argument(flag_name(name), *others, dest=name, default=SUPPRESS, help=help_text.replace("%", "%%"), **spec)


@cache
def documentation(options: type) -> dict[str, str]:
    """The docstring of each option by its name, in one line; those of another class's options are found there.

    Empty where Python has no source of the class.
    """
    owners = {field.name: field.metadata.get("of") for field in dataclasses.fields(options)}
    texts = {name: "" if owner is None else documentation(owner)[name] for name, owner in owners.items()}
    try:
        [declared] = ast.parse(inspect.getsource(options)).body
    except (OSError, TypeError):
        return texts
    assert isinstance(declared, ast.ClassDef), "a class of options is declared at the top of its module"
    for statement, below in itertools.pairwise(declared.body):
        match statement, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(text.split())
    return texts


def add_option_flags(
    group: argparse._ActionsContainer,
    options: type,
    defaults: Mapping[str, Any] | None = None,
    only: Collection[str] | None = None,
) -> None:
    """Add a flag for every field of a dataclass of options, or those of `only`; `defaults` replaces some defaults."""
    hints, texts = typing.get_type_hints(options), documentation(options)
    for field in dataclasses.fields(options):
        if only is not None and field.name not in only:
            continue
        own = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        facts = field.metadata
        others = [*map(flag_name, facts.get("aliases", ()))]
        if (short := facts.get("short")) and short not in group._option_string_actions:  # a command may have its own
            others.append(short)
        default = (defaults or {}).get(field.name, own)
        add_typed_flag(group, field.name, hints[field.name], default, texts[field.name], others)


def options_given(namespace: Namespace, options: type) -> dict[str, Any]:
    """The fields of a dataclass of options that the user gave."""
    names = [field.name for field in dataclasses.fields(options)]
    return {name: getattr(namespace, name) for name in names if hasattr(namespace, name)}


def add_engine_flags(
    parser: ArgumentParser,
    defaults: Mapping[str, Any] | None = None,
    model_help: str = "model directory or hub id (default: the bundled 'demo')",
) -> None:
    """Add MODEL and one flag for every field of `EngineArgs`; `defaults` replaces some of its defaults here."""
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help=model_help)
    add_option_flags(parser.add_argument_group("engine options"), EngineArgs, defaults)
    threads_help = "threads that compute (default: OMP_NUM_THREADS, or one for each fast core of a memory node)"
    parser.add_argument("-t", "--threads", type=positive_int, default=SUPPRESS, metavar="N", help=threads_help)
    parser.set_defaults(**(defaults or {}))


def engine_args_from(namespace: Namespace) -> EngineArgs:
    """The engine options that the user gave; EngineArgs' defaults for the rest.

    Raises:
        ConfigError: the model is named twice and differently, or an option is out of range.
    """
    given = options_given(namespace, EngineArgs)
    if namespace.model_argument is not None:
        if given.get("model", namespace.model_argument) != namespace.model_argument:
            raise ConfigError(f"the model is named twice: {namespace.model_argument!r} and --model {given['model']!r}.")
        given["model"] = hub_id(namespace.model_argument)
    if hasattr(namespace, "threads"):  # before torch is imported, and for processes that start from here
        os.environ["OMP_NUM_THREADS"] = str(namespace.threads)
    return EngineArgs(**given)
