"""Chooses the attention backend. The worker asks once at start-up; a new backend is one line here."""

from collections.abc import Callable
from functools import partial
from typing import Any

from quire.attention.base import AttentionBackend
from quire.attention.native import NativeBackend
from quire.attention.reference import ReferenceBackend
from quire.errors import ConfigError

_BACKENDS: dict[str, Callable[[], AttentionBackend[Any]]] = {
    "reference": ReferenceBackend,
    "native": NativeBackend,
    "native-int8": partial(NativeBackend, int8=True),
}


def select_backend(name: str) -> AttentionBackend[Any]:
    """Make the backend called `name`.

    Raises:
        ConfigError: no backend has that name.
    """
    if name not in _BACKENDS:
        raise ConfigError(f"attention backend must be one of {', '.join(_BACKENDS)}; got {name!r}.")
    return _BACKENDS[name]()
