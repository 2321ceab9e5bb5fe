"""Finds and loads the compiled kernels, and chooses the level of CPU features that they use.

The library is plain C, loaded with ctypes: nothing to build per Python version, and every call lets go of the GIL. It
is absent where Quire was installed without a compiler; then the plain-torch twins (`quire.ops.reference`) do the work.
Two environment variables serve tests: QUIRE_NATIVE_LIBRARY names another file, QUIRE_KERNELS another default level.
"""

import ctypes
import logging
import os
from functools import cache
from pathlib import Path

import torch

from quire.errors import ConfigError

logger = logging.getLogger(__name__)

ABI_VERSION = 1  # as quire_abi_version() in csrc/api.cpp
TORCH = "torch"  # the level that is no library at all

_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "quire_abi_version": (ctypes.c_int32, []),
    "quire_level": (ctypes.c_char_p, [ctypes.c_int32]),
    "quire_set_level": (ctypes.c_int32, [ctypes.c_char_p]),
    "quire_current_level": (ctypes.c_char_p, []),
    "quire_set_num_threads": (None, [ctypes.c_int32]),
    "quire_num_threads": (ctypes.c_int32, []),
    "quire_struct_size": (ctypes.c_int64, [ctypes.c_int32]),
    "quire_program_create": (
        ctypes.c_void_p,
        [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32],
    ),
    "quire_program_destroy": (None, [ctypes.c_void_p]),
    "quire_program_reserve": (None, [ctypes.c_void_p, ctypes.c_int64]),
    "quire_program_run": (None, [ctypes.c_void_p, ctypes.c_void_p]),
    "quire_program_times": (ctypes.POINTER(ctypes.c_double), [ctypes.c_void_p]),
    "quire_pack": (None, [ctypes.c_void_p]),
    "quire_unpack": (None, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]),
    "quire_sample": (ctypes.c_int32, [ctypes.c_void_p]),
    "quire_prefault": (None, [ctypes.c_void_p, ctypes.c_int64]),
}


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where there are none for this machine (the reason is logged once)."""
    path = Path(os.environ.get("QUIRE_NATIVE_LIBRARY") or Path(__file__).with_name("_kernels.so"))
    if not path.exists():
        logger.info("no compiled kernels (%s): plain torch is used", path.name)
        return None
    try:
        loaded = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        logger.warning("the compiled kernels can't be loaded (%s): plain torch is used; reinstall Quire", error)
        return None
    if loaded.quire_abi_version() != ABI_VERSION:
        logger.warning("the compiled kernels are of another version of Quire: plain torch is used; reinstall Quire")
        return None
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
    if found is None:
        return [TORCH]
    names: list[str] = []
    while (name := found.quire_level(len(names))) is not None:
        names.append(name.decode())
    return [*names, TORCH]


def choose_level(wanted: str = "auto") -> str:
    """The level called `wanted`, or with "auto" the best one (or what QUIRE_KERNELS says).

    Raises:
        ConfigError: this machine has no such level.
    """
    if wanted == "auto":
        wanted = os.environ.get("QUIRE_KERNELS") or levels()[0]
    if wanted not in levels():
        raise ConfigError(f"kernels={wanted!r} can't be used on this machine; it has auto, {', '.join(levels())}.")
    return wanted


def set_level(name: str) -> None:
    """Use a level from now on, for packing, sampling and programs yet to be recorded; "torch" changes nothing here."""
    if name != TORCH and loaded_library().quire_set_level(name.encode()):
        raise ConfigError(f"kernels={name!r} can't be used on this machine; it has {', '.join(levels())}.")


def current_level() -> str:
    """The level in use."""
    found = library()
    return TORCH if found is None else found.quire_current_level().decode()


def set_num_threads(count: int) -> None:
    """Threads of every kernel from now on, the caller among them."""
    found = library()
    if found is not None:
        found.quire_set_num_threads(count)


def prefault(tensor: torch.Tensor) -> None:
    """Touch every page of a contiguous tensor on all threads; its contents stay. Nothing where there is no library."""
    found = library()
    if found is not None and tensor.numel():
        assert tensor.is_contiguous()
        found.quire_prefault(tensor.data_ptr(), tensor.numel() * tensor.element_size())
