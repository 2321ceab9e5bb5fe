"""vLLM's names where its scripts look for them: modules to import, names in them, and what is said of those not here.

`import quire` puts a `Finder` before Python's own; vllm_names.txt beside this has the names. A module of vLLM's that is
none of Quire's is empty but for them, and Quire's own modules have them where they have no such name themselves.
"""

import importlib
import sys
from functools import cache, partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from quire.errors import NotYetSupportedError


class NotHereError(NotYetSupportedError, ModuleNotFoundError):
    """A module or a name of vLLM's that Quire has not; the message says why, and what to use instead."""


class _NotYetThere(NotYetSupportedError, AttributeError):
    """Of a method that a class of vLLM's has; hasattr() is False."""


@cache
def vllm_names() -> dict[str, dict[str, str]]:
    """Module, or class -> name -> where it lies, as MODULE:NAME, or what is said of it."""
    sections = Path(__file__).with_name("vllm_names.txt").read_text(encoding="utf-8").split("\n[")[1:]
    told = {head: [line.split(" = ", 1) for line in lines if line] for head, *lines in map(str.splitlines, sections)}
    return {head[:-1]: {name: found for names, found in each for name in names.split()} for head, each in told.items()}


def named(module: str, name: str) -> Any:
    """What a name of a module stands for.

    Raises:
        NotHereError: it is vLLM's, and not here.
        AttributeError: nobody knows it.
    """
    if (found := vllm_names()[module].get(name)) is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    if " " in found:
        raise NotHereError(f"{module}.{name} {found}")
    home, _, own = found.partition(":")
    return getattr(importlib.import_module(home), own or name)


def lacking(owner: object, name: str) -> AttributeError:
    """The error of an attribute that an object has not: what is said of it, where vLLM's class of that name has it."""
    kind = type(owner).__name__
    if told := vllm_names().get(kind, {}).get(name):
        return _NotYetThere(f"{kind}.{name} {told}")
    return AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=owner)


class Finder:
    """Finds modules of the table, and makes them; `own` is the loader of Quire's own module of that name.

    No class of `importlib.abc`, which takes longer to import than all else that `import quire` needs.
    """

    def __init__(self, own: Any = None) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if (names := vllm_names().get(fullname)) is None:
            return None
        if "*" in names:
            raise NotHereError(f"{fullname} {names['*']}")
        spec: Any = PathFinder.find_spec(fullname, path) or ModuleSpec(fullname, None, is_package=True)
        if any(each.startswith(f"{fullname}.") for each in vllm_names()):  # a package there, if it is a file here
            spec.submodule_search_locations = spec.submodule_search_locations or []
        spec.loader = Finder(spec.loader)
        return spec

    def create_module(self, spec: ModuleSpec) -> None: ...

    def exec_module(self, module: ModuleType) -> None:
        if self._own is not None:
            self._own.exec_module(module)
        vars(module).setdefault("__getattr__", partial(named, module.__name__))


def install() -> None:
    """Have imports find vLLM's names from now on."""
    sys.meta_path.insert(0, Finder())
