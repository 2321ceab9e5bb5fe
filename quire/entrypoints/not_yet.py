"""The engine's options as keywords, and what to say to someone who gives one of vLLM's that Quire does not have.

`LLM` and `quire.EngineArgs` read theirs here. The answers stand in not_yet.txt, which nobody reads before an unknown
option is given, the command line's too. An entry goes when its feature comes.
"""

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from quire.config.engine_args import EngineArgs
from quire.errors import ConfigError
from quire.utils import answers as tables
from quire.utils.suggest import hint

_PATH = Path(__file__).with_name("not_yet.txt")
answers = partial(tables.read_answers, _PATH)
take_anyway = partial(tables.take_anyway, _PATH)


def engine_args(**kwargs: Any) -> EngineArgs:
    """EngineArgs from keyword arguments; an unknown one is a ConfigError that names the nearest known one.

    One that vLLM has and Quire has not yet is a NotYetSupportedError. None and "auto" are an option's default.
    """
    known = [field.name for field in fields(EngineArgs)]
    aliases = {alias: field.name for field in fields(EngineArgs) for alias in field.metadata.get("aliases", ())}
    for alias in aliases.keys() & kwargs.keys():
        if aliases[alias] in kwargs:
            raise ConfigError(f"{alias} and {aliases[alias]} are two names of one option; give one of them.")
        kwargs[aliases[alias]] = kwargs.pop(alias)
    for name in [name for name in kwargs if name not in known]:
        if not take_anyway(name, kwargs.pop(name)):
            remedy = hint(name, known, "See quire.EngineArgs for the options there are.")
            raise ConfigError(f"unknown engine argument {name!r}. {remedy}")
    given: dict[str, Any] = {name: v for name, v in kwargs.items() if str(v) not in ("None", "auto") or name == "model"}
    given["dtype"] = str(given.get("dtype", "auto")).removeprefix("torch.")  # torch.bfloat16, too
    return EngineArgs(**given)
