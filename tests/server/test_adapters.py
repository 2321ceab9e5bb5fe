"""Adapters of a real server: named as models in every dialect, loaded and unloaded while it runs, and refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from loras import demo_adapters, demo_prompts, factors, write_adapter, write_virtual
from serving import RunningServer

ASKED = {"prompt": "Once upon a time", "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    demo_adapters(folder, [4, 8])
    demo_prompts(folder, [6, 9], first=1)
    write_virtual(folder / "wide", torch.zeros(4, 512))
    write_virtual(folder / "untold", torch.zeros(4, 256), num_virtual_tokens=None)
    write_adapter(folder / "foreign", factors({"model.layers.0.mlp.up_proj": (64, 32)}, 4, 1), 4)
    outside = write_adapter(tmp_path_factory.mktemp("outside"), factors({}, 4, 1), 4)
    (folder / "link").symlink_to(outside)
    (folder / "half").mkdir()
    (folder / "half" / "adapter_config.json").symlink_to(outside / "adapter_config.json")
    return folder


@pytest.fixture(scope="module", params=["1", pytest.param("2", marks=pytest.mark.nightly)], ids="{} engines".format)
def adapted(request: pytest.FixtureRequest, server_of: Callable[..., RunningServer], home: Path) -> RunningServer:
    modules = ("--lora-modules", f"one={home / 'voice-1'}", "--allowed-adapter-dir", str(home))
    prompts = ("--enable-prompt-adapter", "--prompt-adapters", f"mood={home / 'mood-1'}")
    return server_of("--enable-lora", *modules, *prompts, "--data-parallel-size", request.param)


def text(server: RunningServer, model: str) -> str:
    return server.post("/v1/completions", ASKED | {"model": model}).json()["choices"][0]["text"]


def test_an_adapter_is_a_model_of_its_name(adapted: RunningServer, home: Path) -> None:
    with openai.OpenAI(base_url=f"{adapted.url}/v1", api_key="none", max_retries=0) as client:
        models = {model.id: model for model in client.models.list()}
        assert (shown := models["one"].model_extra) is not None
        assert (shown["parent"], shown["root"]) == ("demo", str(home / "voice-1"))
        texts = [client.completions.create(model=name, **ASKED).choices[0].text for name in ("demo", "one")]  # type: ignore[arg-type]
        assert texts[0] != texts[1]
        answer = client.chat.completions.create(
            model="one", messages=[{"role": "user", "content": "Hi"}], max_tokens=4, temperature=0
        )
        assert answer.model == "one"
        said = client.responses.create(model="one", input="Hi", max_output_tokens=4, temperature=0, store=False)
        assert said.output_text == answer.choices[0].message.content


def test_adapters_come_and_go(adapted: RunningServer) -> None:
    before = text(adapted, "one")
    told = {"lora_name": "two", "lora_path": "voice-2"}
    assert adapted.post("/v1/load_lora_adapter", told).status == 200
    again = adapted.post("/v1/load_lora_adapter", told)
    assert (again.status, "has already been loaded" in again.body.decode()) == (400, True)
    assert len({text(adapted, name) for name in ("demo", "one", "two")}) == 3
    assert adapted.post("/v1/unload_lora_adapter", {"lora_name": "two"}).status == 200
    assert adapted.post("/v1/unload_lora_adapter", {"lora_name": "two"}).status == 404
    assert adapted.post("/v1/completions", ASKED | {"model": "two"}).status == 404
    assert text(adapted, "one") == before


def test_an_adapter_takes_the_place_of_another(adapted: RunningServer) -> None:
    """Of its name, where that is asked for; whoever runs with the other goes on with that."""
    told: dict[str, Any] = {"lora_name": "swap", "lora_path": "voice-2", "load_inplace": True}
    asked: dict[str, Any] = ASKED | {"model": "swap", "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    assert adapted.post("/v1/load_lora_adapter", told).status == 200, "there need be none yet"
    with openai.OpenAI(base_url=f"{adapted.url}/v1", api_key="none", max_retries=0) as client:
        before = client.completions.create(**asked).choices[0].text
        stream = client.completions.create(**asked, stream=True)
        begun = next(stream).choices[0].text
        assert adapted.post("/v1/load_lora_adapter", told | {"lora_path": "voice-1"}).status == 200
        assert text(adapted, "swap") == text(adapted, "one")
        assert begun + "".join(chunk.choices[0].text for chunk in stream) == before
    for name in ("demo", "mood"):
        answer = adapted.post("/v1/load_lora_adapter", told | {"lora_name": name})
        assert answer.status == (400 if name == "demo" else 200), answer.body
    assert adapted.post("/v1/load_lora_adapter", told | {"lora_name": "mood", "lora_path": "mood-1"}).status == 200
    assert adapted.post("/v1/unload_lora_adapter", {"lora_name": "swap"}).status == 200


def test_a_prompt_adapter_is_a_model_of_its_name(adapted: RunningServer, home: Path) -> None:
    """In every dialect; virtual tokens are nobody's prompt."""
    with openai.OpenAI(base_url=f"{adapted.url}/v1", api_key="none", max_retries=0) as client:
        models = {model.id: model.model_extra or {} for model in client.models.list()}
        assert (models["mood"]["parent"], models["mood"]["root"]) == ("demo", str(home / "mood-1"))
        both = [client.completions.create(model=name, echo=True, **ASKED) for name in ("demo", "mood")]  # type: ignore[arg-type]
        assert both[0].choices[0].text != both[1].choices[0].text
        assert both[1].choices[0].text.startswith(ASKED["prompt"])  # type: ignore[arg-type]
        assert both[0].usage is not None
        assert both[1].usage is not None
        assert both[0].usage.prompt_tokens == both[1].usage.prompt_tokens
        answer = client.chat.completions.create(
            model="mood", messages=[{"role": "user", "content": "Hi"}], max_tokens=4, temperature=0
        )
        said = client.responses.create(model="mood", input="Hi", max_output_tokens=4, temperature=0, store=False)
        assert said.output_text == answer.choices[0].message.content
    assert adapted.post("/v1/load_lora_adapter", {"lora_name": "later", "lora_path": "mood-2"}).status == 200
    assert len({text(adapted, name) for name in ("demo", "one", "mood", "later")}) == 4
    assert adapted.post("/v1/unload_lora_adapter", {"lora_name": "later"}).status == 200
    assert adapted.post("/v1/completions", ASKED | {"model": "later"}).status == 404


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("../outside", 400, "leads out of --allowed-adapter-dir"),
        ("/etc", 400, "leads out of --allowed-adapter-dir"),
        ("link", 400, "leads out of --allowed-adapter-dir"),
        ("half", 400, "leads out of --allowed-adapter-dir"),
        ("a\0b", 400, "leads out of --allowed-adapter-dir"),
        ("nobody", 404, "there is no folder 'nobody'"),
        ("é" * 200, 404, "there is no folder 'é"),  # longer than a name may be
        ("foreign", 400, "it was made for another base model"),
        ("wide", 400, "it was made for another base model"),
        ("untold", 400, "must have 'prompt_embeddings' [None, width]"),
    ],
)
def test_what_is_not_loaded(adapted: RunningServer, home: Path, path: str, status: int, message: str) -> None:
    answer = adapted.post("/v1/load_lora_adapter", {"lora_name": "bad", "lora_path": path})
    assert (answer.status, message in answer.body.decode()) == (status, True), answer.body
    assert str(home) not in answer.body.decode()
    assert adapted.post("/v1/completions", ASKED | {"model": "bad"}).status == 404
