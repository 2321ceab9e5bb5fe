"""Routes that tell about the server."""

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

import quire
from quire.entrypoints.server.app import build_app


def test_models(make_client: Callable[..., TestClient]) -> None:
    client = make_client(served_model_name=["first", "org/second"])
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["first", "org/second"]
    assert [card["root"] for card in listed["data"]] == ["demo", "demo"], "what the server was told to serve"
    assert listed["data"][0] == {
        "id": "first", "object": "model", "created": 1, "owned_by": "quire", "root": "demo", "parent": None,
        "max_model_len": 1024,
    }  # fmt: skip
    assert client.get("/v1/models/org/second").json()["id"] == "org/second"
    refused = client.get("/v1/models/third")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_tokenize_and_back(client: TestClient) -> None:
    answer = client.post(
        "/tokenize", json={"prompt": "Once upon a time", "return_token_strs": True, "add_special_tokens": False}
    ).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) > 0
    assert answer["max_model_len"] == 1024
    text = client.post("/detokenize", json={"model": "demo", "tokens": answer["tokens"]}).json()
    assert text == {"prompt": "Once upon a time", "content": "Once upon a time"}
    bare = client.post("/tokenize", json={"prompt": "Once", "return_token_strs": None})
    assert bare.json()["token_strs"] is None, "as vLLM takes it"


def test_a_long_list_of_tokens_is_encoded_in_parts(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the lists, whatever the place of the cut."""
    whole = client.post("/tokenize", json={"prompt": "Once upon a time, there", "return_token_strs": True})
    for size in (1, 2, 3, whole.json()["count"], whole.json()["count"] + 1):
        monkeypatch.setattr("quire.entrypoints.server.info._PART", size)
        cut = client.post("/tokenize", json={"prompt": "Once upon a time, there", "return_token_strs": True})
        assert cut.content == whole.content
        assert cut.headers["content-length"] == str(len(cut.content))
    assert client.post("/tokenize", json={"prompt": "", "add_special_tokens": False}).json() == {
        "count": 0, "max_model_len": 1024, "tokens": [], "token_strs": None,
    }  # fmt: skip


def test_tokenize_a_conversation(client: TestClient, async_llm) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "add_generation_prompt": False}
    answer = client.post("/tokenize", json=body).json()
    assert answer["tokens"] == async_llm.tokenizer.encode("user:hi", False)
    assert answer["token_strs"] is None
    assert async_llm.rendered[0]["add_generation_prompt"] is False


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"prompt": "x", "return_token_strs": "yes"}, "return_token_strs"),
    ],
)
def test_tokenize_refuses(client: TestClient, body: dict, param: str) -> None:
    answer = client.post("/tokenize", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], ["1"], [True], "12", None])
def test_detokenize_refuses(client: TestClient, tokens: object) -> None:
    answer = client.post("/detokenize", json={"tokens": tokens})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("tokens")


def test_unknown_fields_are_named(client: TestClient) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
        answer = client.post(path, json=body | {"promt": 1})
        assert answer.headers["x-quire-warnings"] == "unknown fields, which are ignored: 'promt'"


def test_tokenizer_info(client: TestClient, async_llm) -> None:
    info = client.get("/tokenizer_info").json()
    assert (info["eos_token"], info["vocab_size"]) == ("<|endoftext|>", 4096)
    assert info["chat_template"] == async_llm.tokenizer.chat_template


def test_without_a_tokenizer(client: TestClient, async_llm) -> None:
    async_llm.tokenizer = None
    for answer in (client.get("/tokenizer_info"), client.post("/detokenize", json={"tokens": [1]})):
        assert answer.status_code == 400
        assert "no tokenizer" in answer.json()["error"]["message"]


def test_health(client: TestClient, async_llm) -> None:
    calls = [lambda: client.get("/health"), lambda: client.get("/ping"), lambda: client.post("/ping")]
    assert [(call().status_code, call().content) for call in calls] == [(200, b"")] * 3
    async_llm.die()
    assert [(call().status_code, call().content) for call in calls] == [(503, b"")] * 3


def test_version(client: TestClient) -> None:
    assert client.get("/version").json() == {"version": quire.__version__}


def test_load_counts_work_only(make_state: Callable[..., Any], async_llm) -> None:
    """An autoscaler must see an idle server as idle: neither its own questions nor a probe's are load."""
    state = make_state()
    seen: list[int] = []

    async def note() -> None:
        seen.append(state.num_in_flight)

    async_llm.check_health = note
    client = TestClient(build_app(state))
    assert client.get("/load").json() == {"server_load": 0}
    assert client.get("/load/").json() == {"server_load": 0}
    client.get("/health")
    client.get("/ping")
    assert seen == [0, 0]
    client.post("/v1/completions", json={"prompt": "x"})  # generate() asks for the health, too
    assert seen[2] == 1
    assert client.get("/load").json() == {"server_load": 0}


def test_metrics(client: TestClient, async_llm) -> None:
    async_llm.observer.event_loop_max_stall = 0.5
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name="demo"} 0.25' in answer.text
    assert 'quire:event_loop_max_stall_seconds{engine="0",model_name="demo"} 0.5' in answer.text
