"""The engine's options as keywords, and what to say to someone who gives one of vLLM's that Quire does not have.

`LLM` and `quire.EngineArgs` read theirs here. The answers stand in not_yet.txt, which nobody reads before an unknown
option is given, the command line's too. An entry goes when its feature comes.
"""

import logging
import os
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from quire.config.engine_args import EngineArgs
from quire.errors import ConfigError, NotYetSupportedError
from quire.utils.suggest import nearest

logger = logging.getLogger(__name__)


@cache
def answers() -> dict[str, tuple[str, str]]:
    """Name (underscores, no dashes before it; or one dash) -> what of it is taken all the same, and what is said."""
    lines = Path(__file__).with_name("not_yet.txt").read_text(encoding="utf-8").splitlines()
    entries = [line.split(": ", 1) for line in lines if line and line[0] != "#"]
    return {each.partition("=")[0]: (each.partition("=")[2], told) for names, told in entries for each in names.split()}


def take_anyway(name: str, value: Any, shown: str | None = None) -> bool:
    """Whether an option is one of these, and this value of it no error; where it has no effect, the log says so.

    Args:
        shown: what messages call it; its name by default.

    Raises:
        NotYetSupportedError: the message says why, and what to do instead.
    """
    taken, told = answers().get(name, ("", ""))
    if taken in ("-", "*", "+") and value is not None and value is not False:
        logger.warning("%s %s", shown or name, told)
    elif told and str(value) not in ("None", "False", *taken.replace("so", "True").split("|")):
        raise NotYetSupportedError(f"{shown or name} {told}")
    return bool(told)


def engine_args(**kwargs: Any) -> EngineArgs:
    """EngineArgs from keyword arguments; an unknown one is a ConfigError that names the nearest known one.

    One that vLLM has and Quire has not yet is a NotYetSupportedError. None is an option's default.
    """
    known = [field.name for field in fields(EngineArgs)]
    aliases = {alias: field.name for field in fields(EngineArgs) for alias in field.metadata.get("aliases", ())}
    for alias in aliases.keys() & kwargs.keys():
        if aliases[alias] in kwargs:
            raise ConfigError(f"{alias} and {aliases[alias]} are two names of one option; give one of them.")
        kwargs[aliases[alias]] = kwargs.pop(alias)
    for name in [*kwargs]:
        if name not in known:
            if take_anyway(name, kwargs[name]):
                del kwargs[name]
                continue
            close = nearest(name, known)
            hint = f" Did you mean {close!r}?" if close else " See quire.EngineArgs for the options there are."
            raise ConfigError(f"unknown engine argument {name!r}.{hint}")
    given: dict[str, Any] = {name: v for name, v in kwargs.items() if v is not None or name == "model"}
    return EngineArgs(**{name: os.fspath(v) if isinstance(v, os.PathLike) else v for name, v in given.items()})
