"""Chooses the attention backend. The worker asks once at start-up; a new backend is one line here."""

from typing import Any

from quire.attention.backend import AttentionBackend
from quire.attention.reference import ReferenceBackend
from quire.errors import ConfigError

_BACKENDS: dict[str, type[AttentionBackend[Any]]] = {"reference": ReferenceBackend}


def select_backend(name: str = "auto") -> AttentionBackend[Any]:
    """Make the backend called `name`, or with "auto" the fastest one that this machine can run.

    Raises:
        ConfigError: no backend has that name.
    """
    if name == "auto":
        name = "reference"
    if name not in _BACKENDS:
        raise ConfigError(f"attention backend must be one of auto, {', '.join(_BACKENDS)}; got {name!r}.")
    return _BACKENDS[name]()
