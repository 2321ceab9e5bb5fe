"""A real server with several models: loaded when asked for, unloaded for others, and each fault one model's own."""

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import RunningServer, command_line

from quire.utils.hub import resolve_model_path
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two copies of the demo, and one that is not whole."""
    path, demo = tmp_path_factory.mktemp("models"), resolve_model_path("demo")
    for name in ("alpha", "beta", "broken"):
        (path / name).mkdir()
        for file in demo.glob("*.json"):
            shutil.copy(file, path / name)
        if name != "broken":
            os.link(demo / "model.safetensors", path / name / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def fleet(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    flags = ("--models-dir", str(models), "--max-loaded-models", "2", "--max-model-wait", "1")
    server = RunningServer(tmp_path_factory.mktemp("fleet") / "log", *flags)
    yield server
    server.stop()


def states(server: RunningServer) -> dict[str, str]:
    return {card["id"]: card["state"] for card in server.get("/v1/models").json()["data"]}


def engines(server: RunningServer) -> list[int]:
    return [pid for pid in server.processes() if b"entrypoints.engine" in command_line(pid)]


def test_each_is_loaded_once_and_all_routes_are_its_own(fleet: RunningServer) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["demo", "alpha", "beta", "broken"]
    assert set(states(fleet).values()) == {"unloaded"}
    assert engines(fleet) == []
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: fleet.complete("The old house", model="alpha", max_tokens=4), range(4)))
    assert [answer["model"] for answer in answers] == ["alpha"] * 4
    assert len(engines(fleet)) == 1
    assert fleet.complete("The old house", max_tokens=4)["model"] == "demo"  # the first one
    assert fleet.complete("The old house", max_tokens=4, model="")["model"] == "demo"
    card = client.models.retrieve("alpha")
    assert (card.state, card.num_requests) == ("ready", 0)
    assert card.memory > card.size > 2**20
    for path, fields in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 16}),
    ):
        assert fleet.post(path, {"model": "alpha", **fields}).json()["model"] == "alpha"
    chat = {"messages": [{"role": "user", "content": "Hello"}], "stream": False, "options": {"num_predict": 4}}
    assert fleet.post("/api/chat", {"model": "alpha:latest", **chat}).json()["model"] == "alpha"
    assert fleet.post("/api/show", {"model": "beta:latest"}).json()["modelfile"].endswith("beta")
    assert states(fleet)["beta"] == "unloaded"  # to be told about is no reason to load it
    assert [model["name"] for model in fleet.get("/api/ps").json()["models"]] == ["demo:latest", "alpha:latest"]
    for path in ("/tokenize", "/v1/completions/render"):
        assert fleet.post(path, {"model": "alpha", "prompt": "Hello"}).status == 200
    assert fleet.stream("/v1/completions", {"model": "alpha", "prompt": "Hello"})[0]["model"] == "alpha"
    assert fleet.get("/tokenizer_info?model=alpha").status == 200
    assert b"not loaded" in fleet.get("/live?model=beta").body
    families = text_string_to_metric_families(fleet.get("/metrics").body.decode())
    assert {sample.labels.get("model_name") for family in families for sample in family.samples} == {
        "demo",
        "alpha",
        None,
    }
    assert fleet.get("/health").status == 200
    assert len(engines(fleet)) == 2


def test_what_is_not_there_and_what_does_not_load(fleet: RunningServer) -> None:
    unknown = fleet.post("/v1/completions", {"model": "gamma", "prompt": "x"})
    assert unknown.status == fleet.get("/v1/models/gamma").status == 404
    assert "'alpha'" in unknown.json()["error"]["message"]
    fleet.complete("x", model="alpha", max_tokens=1)
    before, running = states(fleet), engines(fleet)
    broken = fleet.post("/v1/completions", {"model": "broken", "prompt": "x"})
    assert broken.status == 500
    assert (states(fleet), engines(fleet)) == (before, running), "it has pushed out nobody"
    assert "'broken' can't be loaded" in broken.json()["error"]["message"]
    assert "safetensors" in fleet.get("/v1/models/broken").json()["error"]
    assert fleet.complete("The old house", model="demo", max_tokens=1)
    assert engines(fleet) == running


def test_room_is_made_by_idle_ones_only_and_a_response_outlives_its_model(fleet: RunningServer) -> None:
    fields = {"input": "Hello", "max_output_tokens": 500, "background": True}
    jobs = [fleet.post("/v1/responses", {"model": name, **fields}).json() for name in ("demo", "alpha")]
    refused = fleet.post("/v1/completions", {"model": "beta", "prompt": "x"})
    if refused.status == 503:  # the jobs took as long as that
        assert int(refused.headers["Retry-After"]) > 0
    assert fleet.complete("x", model="beta", max_tokens=1)["model"] == "beta"
    assert sorted(states(fleet).values()).count("ready") == 2
    for job in jobs:
        url = f"/v1/responses/{job['id']}"
        wait_until(lambda url=url: fleet.get(url).json()["status"] not in ("queued", "in_progress"), 20.0)
        assert fleet.get(url).json()["status"] in ("completed", "incomplete")


def test_an_engine_that_dies_is_started_again_even_for_a_client_that_leaves(fleet: RunningServer) -> None:
    fields = {"model": "beta", "prompt": "x", "max_tokens": 400, "n": 8}
    with ThreadPoolExecutor(1) as pool:
        before = engines(fleet)
        running = pool.submit(fleet.post, "/v1/completions", fields)
        wait_until(lambda: fleet.get("/v1/models/beta").json()["num_requests"], 5.0)
        os.kill(before[-1], signal.SIGKILL)  # the newest one
        assert running.result().status in (200, 500)
    wait_until(lambda: states(fleet)["beta"] == "unloaded", 10.0, "its death was not seen")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 30\r\n\r\n"
    with fleet.connect() as connection:
        connection.sendall(head + b'{"model": "beta","prompt":"x"}')
        wait_until(lambda: states(fleet)["beta"] == "loading", 10.0)
    wait_until(lambda: fleet.get("/v1/models/beta").json()["num_requests"] == 0, 10.0)
    assert fleet.complete("x", model="beta", max_tokens=1)["model"] == "beta"
    assert len(engines(fleet)) == 2
    assert fleet.get("/health").status == 200


def test_the_end_while_a_model_is_loaded(models: Path, tmp_path: Path) -> None:
    server = RunningServer(tmp_path / "log", "--models-dir", str(models))
    try:
        with ThreadPoolExecutor(2) as pool:
            waiting: Any = pool.submit(server.post, "/v1/completions", {"model": "alpha", "prompt": "x"})
            wait_until(lambda: states(server)["alpha"] == "loading" and engines(server), 5.0)
            server.signal(signal.SIGTERM)
            assert waiting.result().status == 503
        assert server.process.wait(10) == 0
        wait_until(lambda: not server.processes(), 10.0, "the server left processes behind")
        assert "Traceback" not in server.log()
    finally:
        server.kill()
