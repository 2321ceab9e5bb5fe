"""Adapters that a server has from the start, as its options name them."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from quire.entrypoints.server.adapters import read_modules
from quire.entrypoints.server.options import ServerArgs
from quire.errors import ConfigError


@pytest.mark.parametrize(
    "text", ["path", "{", 10_000 * '{"a":', '{"name": "a"}', '{"name": "a", "path": null}', '{"name": "a", "path": 1}']
)
def test_what_names_no_adapter(text: str) -> None:
    llm = cast(Any, SimpleNamespace(check_adapter=lambda request: pytest.fail("it was looked at")))
    with pytest.raises(ConfigError, match="an adapter is given as name=path"):
        read_modules(ServerArgs(lora_modules=[text]), ["demo"], llm)
