"""Chooses the attention backend. A device asks once, when it is made; a new backend is one line here."""

from collections.abc import Callable
from typing import Literal

from quire.attention.base import AttentionBackend
from quire.attention.native import NativeBackend
from quire.attention.reference import ReferenceBackend
from quire.errors import ConfigError

_BACKENDS: dict[str, Callable[[str | None], AttentionBackend]] = {
    "reference": lambda level: ReferenceBackend(),
    "native": lambda level: NativeBackend(level=level),
    "native-int8": lambda level: NativeBackend(int8=True, level=level),
    "triton": lambda level: _triton("model"),
    "triton-int8": lambda level: _triton("int8"),
    "triton-fp8": lambda level: _triton("fp8"),
}


def _triton(kind: Literal["model", "int8", "fp8"]) -> AttentionBackend:
    from quire.attention.triton import TritonBackend  # Triton is imported where a device needs it

    return TritonBackend(kind)


def select_backend(name: str, level: str | None = None) -> AttentionBackend:
    """Make the backend called `name`; native ones with the kernels of a level, where that is not the default one.

    Raises:
        ConfigError: no backend has that name.
    """
    if name not in _BACKENDS:
        raise ConfigError(f"attention backend must be one of {', '.join(_BACKENDS)}; got {name!r}.")
    return _BACKENDS[name](level)
