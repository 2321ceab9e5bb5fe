"""Finds and loads the compiled kernels, and says which of their levels of CPU features a call is to use.

The library is plain C, loaded with ctypes: nothing to build per Python version, and every call lets go of the GIL. It
is absent where Quire was installed without a compiler; then plain torch (the references in `quire.ops`) does the work.
One that is there but can't be used is replaced by torch too, with a warning; in a checkout it is an error.
Two environment variables serve tests: QUIRE_NATIVE_LIBRARY names another file, QUIRE_KERNELS another default level.
"""

import ctypes
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch

from quire.errors import ConfigError

logger = logging.getLogger(__name__)

ABI_VERSION = 36  # as quire_abi_version() in csrc/api.cpp
# A checkout's library is its developer's to build: silently slower would fool every measurement.
_IS_CHECKOUT = (Path(__file__).parents[3] / "csrc").is_dir()
_REMEDY = "run `make native` in a checkout, else reinstall Quire"
TORCH = "torch"  # the level that is no library at all

# What the library calls the kinds of numbers, addresses and texts.
KINDS: dict[str, Any] = {"none": None, "ptr": ctypes.c_void_p, "bytes": ctypes.c_char_p, "i64": ctypes.c_int64}
KINDS |= {"i32": ctypes.c_int32, "f64": ctypes.c_double, "f32": ctypes.c_float, "u8": ctypes.c_uint8}


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where there are none for this machine (the reason is logged once)."""
    path = library_path()
    if not path.exists():
        logger.info("no compiled kernels (%s): plain torch is used", path.name)
        return None
    loaded = _load(path)
    if isinstance(loaded, str):
        logger.warning("%s: plain torch is used; %s", loaded, _REMEDY)
        return None
    return loaded


def library_fault() -> str | None:
    """Why compiled kernels that are there can't be used, and what to do; None where they can be, or there are none."""
    path = library_path()
    loaded = _load(path) if path.exists() else None
    return f"{loaded}; {_REMEDY}" if isinstance(loaded, str) else None


def library_path() -> Path:
    """Where the compiled kernels are, or would be."""
    return Path(os.environ.get("QUIRE_NATIVE_LIBRARY") or Path(__file__).with_name("_kernels.so"))


def _load(path: Path) -> ctypes.CDLL | str:
    """The library with its functions' types, or what is wrong with it."""
    try:
        loaded = ctypes.CDLL(str(path))
        if loaded.quire_abi_version() != ABI_VERSION:
            return "the compiled kernels are of another version of Quire"
        loaded.quire_function.restype = ctypes.c_char_p
        for name, result, *arguments in map(str.split, _names(loaded.quire_function)):
            function = getattr(loaded, name)
            function.restype, function.argtypes = KINDS[result], [KINDS[kind] for kind in arguments]
    except (OSError, AttributeError) as error:
        return f"the compiled kernels can't be loaded ({error})"
    return loaded


def loaded_library() -> ctypes.CDLL:
    """The compiled kernels, by code that is only reached where there are any."""
    found = library()
    assert found is not None, "no compiled kernels"
    return found


@cache
def levels() -> list[str]:
    """The levels that this machine can run, best first; "torch" always and last."""
    found = library()
    return [TORCH] if found is None else [*_names(found.quire_level), TORCH]


@cache
def operation_names() -> tuple[str, ...]:
    """The operations that programs of kernels are made of, at their numbers."""
    return tuple(_names(loaded_library().quire_operation))


def _names(nth: Callable[[int], bytes | None]) -> Iterator[str]:
    """What a function of the library says for 0, 1, 2, ... until it has none."""
    return (name.decode() for name in takewhile(bool, map(nth, count())) if name)


def choose_level(wanted: str = "auto") -> str:
    """The level called `wanted`, or with "auto" the best one (or what QUIRE_KERNELS says).

    Raises:
        ConfigError: this machine has no such level; or with "auto", this checkout has a library that can't be used.
    """
    if wanted == "auto":
        wanted = os.environ.get("QUIRE_KERNELS") or _best_level()
    if wanted not in levels():
        raise ConfigError(f"kernels={wanted!r} can't be used on this machine; it has auto, {', '.join(levels())}.")
    return wanted


def _best_level() -> str:
    fault = library_fault() if _IS_CHECKOUT and library() is None else None
    if fault is not None:
        raise ConfigError(f"{fault}; kernels='torch' does without them.")
    return levels()[0]


@dataclass(frozen=True)
class Target:
    """Which kernels a program or a call uses, and on how many threads, the caller's among them.

    Two programs of different targets don't disturb each other; results do not depend on the number of threads.
    """

    level: str
    num_threads: int = 1

    @property
    def kernels(self) -> int:
        """The level's kernels, for a call of the library.

        Raises:
            ConfigError: this CPU, or this library, has no such level.
        """
        return _kernels(self.level)


@cache
def _kernels(level: str) -> int:
    found = library()
    address = None if found is None else found.quire_kernels(level.encode())
    if address is None:
        raise ConfigError(f"kernels={level!r} can't be used on this machine; it has {', '.join(levels())}.")
    return address


def default_num_threads() -> int:
    """What OMP_NUM_THREADS says, else one thread for each fast core of one memory node, within the container's share.

    Fewer where torch has been told so: see csrc/topology.h for the rest.
    """
    own, found = torch.get_num_threads(), library()
    known = 0 if found is None or "OMP_NUM_THREADS" in os.environ else found.quire_num_cores(None, None, 0)
    return min(own, known) or own


def default_target() -> Target:
    """The best level (or what QUIRE_KERNELS says) on all threads that compute: for who was told nothing else."""
    level = choose_level()
    return Target(levels()[0] if level == TORCH else level, default_num_threads())


@contextmanager
def torch_threads(num: int) -> Iterator[None]:
    """So many threads in torch; the setting is left as it was."""
    before = torch.get_num_threads()
    if before == num:
        yield
        return
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def prefault(tensor: torch.Tensor, num_threads: int) -> None:
    """Touch every page of a contiguous tensor; its contents stay. Nothing where there is no library.

    With no thread, the library does it by and by, while nothing is computed and an eighth of the memory is left.
    """
    if tensor.numel() and (found := library()) is not None:
        assert tensor.is_contiguous()
        found.quire_prefault(num_threads, tensor.data_ptr(), tensor.numel() * tensor.element_size())
