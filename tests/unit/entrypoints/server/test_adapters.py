"""Adapters that a server has from the start, as its options name them."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import quire
from quire.config.engine_args import EngineArgs
from quire.engine.adapters import AdapterBook
from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.server import launch
from quire.entrypoints.server.adapters import read_modules
from quire.entrypoints.server.options import ServerArgs
from quire.errors import ConfigError

ADAPTERS = Path(quire.__file__).parent / "demo" / "adapters"


@pytest.mark.parametrize(
    "text", ["path", "{", 10_000 * '{"a":', '{"name": "a"}', '{"name": "a", "path": null}', '{"name": "a", "path": 1}']
)
def test_what_names_no_adapter(text: str) -> None:
    with pytest.raises(ConfigError, match="an adapter is given as name=path"):
        read_modules(ServerArgs(lora_modules=[text]), ["demo"])


def test_a_wrong_adapter_is_told_of_before_the_model_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncLLM, "from_engine_args", lambda *_, **__: pytest.fail("the model was loaded"))
    for given, why in (("a", "an adapter is given as"), (f"a={tmp_path}", "'a' can't be used"), ("demo=x", "is taken")):
        with pytest.raises(ConfigError, match=f"^lora_modules.*{why}"):
            launch.load(ServerArgs(lora_modules=[given]), EngineArgs("demo", enable_lora=True))


def test_an_adapter_that_the_engine_does_not_take_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    args = EngineArgs("demo", enable_lora=True)
    llm = SimpleNamespace(find_adapter_now=AdapterBook(args).find, shutdown=lambda: ended.append("llm"))
    monkeypatch.setattr(AsyncLLM, "from_engine_args", lambda *_, **__: llm)
    adapters = ADAPTERS / "talk", ADAPTERS / "sea"  # the second is one of virtual tokens
    with pytest.raises(ConfigError, match=r"^the adapter 'sea' can't be used: .*enable_prompt_adapter=True"):
        launch.load(ServerArgs(lora_modules=[f"{path.name}={path}" for path in adapters]), args)
    assert ended == ["llm"]
