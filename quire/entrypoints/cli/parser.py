"""The parser of a command line: it takes vLLM's ways to write flags, and reports an error in one line.

`quire`'s commands are such parsers, and so is what scripts import as vLLM's `FlexibleArgumentParser`. Knows no flag:
which there are is what was added to it, and what is said of vLLM's others stands in `quire.entrypoints.not_yet`.
"""

import argparse
import json
import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from quire.entrypoints.cli.files import read_text
from quire.entrypoints.not_yet import answers, take_anyway
from quire.errors import ConfigError, NotYetSupportedError
from quire.utils.suggest import nearest

_DRAFTS = {"method": "method", "model": "model", "tokens": "num_speculative_tokens"}
_LONGER = {f"--spec-{short}": f"--speculative-config.{name}" for short, name in _DRAFTS.items()}
_SWITCHED = {"--enable-": "--no-disable-", "--disable-": "--no-enable-"}


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations, and reports an error without pages of usage.

    Flags may have underscores. ``--disable-x`` is ``--no-enable-x``, ``-O3`` is ``--optimization-level 3``, and
    ``--flag.key.key value`` sets a key of a flag of JSON (``key+``: a list, with commas). ``--help=TEXT`` shows flags
    that have it in their names, or a group of them. Flags of vLLM that ask for what is so anyway are taken, and those
    without effect with a warning.

    Attributes:
        source: where the arguments come from, for errors.

    Raises:
        NotYetSupportedError: `parse_args` and its like, for a flag of vLLM that is refused.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self.source = ""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {self.source}{message}\nSee '{self.prog} --help'.\n")

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse's; the command's own parser reads its flags, not the one of all commands."""
        args = sys.argv[1:] if args is None else list(args)
        if self._subparsers is None:
            if "--config" in args[:-1] and "--config" not in self._option_string_actions:  # of a script, as in vLLM
                place = args.index("--config")
                args = [*self._flags_in(args[place + 1]), *args[:place], *args[place + 2 :]]
            args = self._as_ours(args)
        return super().parse_known_args(args, namespace)

    def _get_option_tuples(self, option_string: str) -> Any:
        """As argparse's, without flags of one dash that only begin so: allow_abbrev is not for these."""
        return [each for each in super()._get_option_tuples(option_string) if not each[1].startswith(option_string)]

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Report the first argument that no flag took, with the nearest flag there is."""
        name = next((argument for argument in unknown if argument.startswith("-")), unknown[0]).partition("=")[0]
        close = nearest(name, self._option_string_actions) if name.startswith("-") else None
        self.error(f"unknown argument {name}." + (f" Did you mean {close}?" if close else ""))

    def read_file(self, path: str) -> Namespace:
        """The flags of a YAML file, whose keys are their names; as vLLM reads it.

        Raises:
            ConfigError, NotYetSupportedError: the message names the file, and the key.
        """
        flags, self.source = self._flags_in(path), f"{path}: "
        try:
            namespace, unknown = self.parse_known_args(flags)
        except NotYetSupportedError as error:
            raise NotYetSupportedError(f"{self.source}{error}") from None
        if unknown:
            self.refuse(unknown)
        self.source = ""
        return namespace

    def _flags_in(self, path: str) -> list[str]:
        import yaml  # for few

        try:
            given = yaml.safe_load(read_text(path, "--config", 2**20))
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} can't be read: {' '.join(str(error).split())}.") from None
        if not isinstance(given, dict):
            raise ConfigError(f"{path} must hold keys and values, as 'port: 8000'.")
        return [part for key, value in given.items() for part in self._flag_of(f"--{key}", value)]

    def _flag_of(self, flag: str, value: Any) -> list[str]:
        if isinstance(value, bool):
            return [flag if value else f"--no-{flag[2:]}"]
        values = [each for each in (value if isinstance(value, list) else [value]) if each is not None]
        texts = [json.dumps(each, default=str) if isinstance(each, dict) else str(each) for each in values]
        return [flag, *texts] if len(texts) > 1 else [f"{flag}={text}" for text in texts]

    def _as_ours(self, given: list[str]) -> list[str]:
        end = given.index("--") if "--" in given else len(given)
        result, rest = list[str](), given[:end][::-1]
        objects: dict[str, Any] = {}  # flag of JSON -> what its keys were given
        while rest:
            name, equals, value = self._spelled(rest.pop()).partition("=")
            flag, dot, keys = name.partition(".")
            is_known = flag in self._option_string_actions
            if is_known and dot:
                own = self._option_string_actions[flag].option_strings[0]
                _set(objects.setdefault(own, {}), keys, value if equals else rest.pop() if rest else "")
            elif is_known or flag[:1] != "-" or not _does_without(flag, value if equals else None, rest):
                result.append(name + equals + value)
        return [*result, *(f"{flag}={json.dumps(keys)}" for flag, keys in objects.items()), *given[end:]]

    def _show(self, wanted: str) -> NoReturn:
        """Print the help of flags that have this in their names, or of a group; "listgroup": the groups' names."""
        formatter, groups = self._get_formatter(), {str(group.title): group for group in self._action_groups}
        for title, group in groups.items():
            whole = wanted in ("all", "page", title, title.removesuffix(" options"))
            own = [one for one in group._group_actions if whole or any(wanted in flag for flag in one.option_strings)]
            formatter.start_section(title)
            formatter.add_arguments(own)
            formatter.end_section()
        if not (text := formatter.format_help()) and wanted != "listgroup":
            self.error(f"--help={wanted}: no flag has that in its name; groups are {', '.join(groups)}.")
        print(text or "\n".join(groups))
        self.exit()

    def _spelled(self, argument: str) -> str:
        if argument.startswith("--help="):
            self._show(argument[7:].lower().replace("_", "-").removeprefix("--"))
        if re.fullmatch(r"-O(=?[0-3])?", argument):
            return f"--optimization-level={argument[-1]}" if argument != "-O" else "--optimization-level"
        if not argument.startswith("--"):
            return argument
        name, equals, value = argument.partition("=")
        flag, dot, keys = name.partition(".")
        flag = flag.replace("_", "-")
        if flag not in self._option_string_actions:
            turned = [other + flag[len(way) :] for way, other in _SWITCHED.items() if flag.startswith(way)]
            flag = next((each for each in turned if each in self._option_string_actions), _LONGER.get(flag, flag))
        return flag + dot + keys + equals + value


def _does_without(flag: str, value: str | None, rest: list[str]) -> bool:
    """Whether a flag is one of vLLM's that is taken all the same; its values are taken off the end of `rest`, then."""
    name = flag[2:].replace("-", "_") if flag.startswith("--") else flag
    if name.startswith("no_"):
        return answers().get(name[3:], ("",))[0] in ("no", "-")
    taken, told = answers().get(name, ("", ""))
    if told and value is None and taken not in ("", "no", "so", "-"):
        value = rest.pop() if rest else ""
        while taken == "+" and rest and not rest[-1].startswith("-"):
            rest.pop()
    return take_anyway(name, True if value is None else value, flag)


def _set(place: dict[str, Any], keys: str, text: str) -> None:
    """Set a key of an object of JSON, as 'one.two'."""
    *outer, last = keys.split(".")
    for key in outer:
        if not isinstance(place.get(key), dict):
            place[key] = {}  # as of a flag that comes twice, the last one is what counts
        place = place[key]
    try:
        place[last.rstrip("+")] = text.split(",") if last.endswith("+") else json.loads(text)
    except (ValueError, RecursionError):
        place[last] = text
