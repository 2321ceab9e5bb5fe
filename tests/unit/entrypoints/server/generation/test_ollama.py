"""Ollama's routes: its objects and lines, options by their names, tools and thoughts, models' names with tags."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from quire.entrypoints.server.dialects.ollama import _messages
from quire.entrypoints.server.ollama_requests import OllamaMessage
from quire.entrypoints.server.ollama_routes import _in_short

TEXT = "Once upon a time there was a café."
HI = {"messages": [{"role": "user", "content": "Hi"}]}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def post(client: TestClient, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json={"model": "demo", "stream": False} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def lines(client: TestClient, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = client.post(path, json={"model": "demo"} | body)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson")
    assert answer.text.endswith("\n")
    return [json.loads(line) for line in answer.text.splitlines()]


def prompt_of(server: Any) -> str:
    return server.core.tokenizer.decode(server.core.requests[-1].prompt_token_ids, skip_special_tokens=False)


@pytest.mark.parametrize(("path", "body"), [("/api/chat", HI), ("/api/generate", {"prompt": "Hi", "system": "Be."})])
def test_an_answer_and_its_lines(client: TestClient, path: str, body: dict[str, Any]) -> None:
    def text_of(answer: dict[str, Any]) -> str:
        return answer["message"]["content"] if path == "/api/chat" else answer["response"]

    whole = post(client, path, **body)
    assert (whole["model"], text_of(whole), whole["done"], whole["done_reason"]) == ("demo", TEXT, True, "stop")
    assert whole["eval_count"] > 5 < whole["prompt_eval_count"]
    parts = [whole[f"{name}_duration"] for name in ("load", "prompt_eval", "eval")]
    assert whole["total_duration"] == sum(parts)
    *pieces, last = lines(client, path, **body)
    assert len(pieces) > 3
    assert "".join(map(text_of, pieces)) == TEXT
    assert {piece["done"] for piece in pieces} == {False}
    assert (text_of(last), last["done"], last["done_reason"]) == ("", True, "stop")
    assert last["eval_count"] == whole["eval_count"]
    cut = post(client, path, **body, options={"num_predict": 3})
    assert (cut["done_reason"], cut["eval_count"]) == ("length", 3)
    beyond = post(client, path, **body, options={"num_predict": 100_000})  # the context bounds it
    assert beyond["done_reason"] == "stop"


@pytest.mark.parametrize(
    ("path", "body"),
    [("/api/chat", HI), ("/api/generate", {"prompt": "Hi"}), ("/api/generate", {"prompt": "Hi", "raw": True})],
)
def test_logprobs(client: TestClient, path: str, body: dict[str, Any]) -> None:
    """Of each token, with the likeliest in its place; in a stream with the piece that its token came by."""
    told = post(client, path, **body, logprobs=True, top_logprobs=2)["logprobs"]
    assert len(told) > 3
    for entry in told:
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
        assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.6, -0.7]
        assert (entry["token"], entry["logprob"]) == (entry["top_logprobs"][1]["token"], -0.7)
    assert bytes(byte for entry in told for byte in entry["bytes"]).decode().startswith(TEXT)
    pieces = lines(client, path, **body, logprobs=True, top_logprobs=2)
    assert [entry for piece in pieces for entry in piece.get("logprobs", [])] == told
    bare = post(client, path, **body, logprobs=True)["logprobs"]
    assert [entry["top_logprobs"] for entry in bare] == [[]] * len(told)
    assert "logprobs" not in post(client, path, **body, top_logprobs=2)
    answer = client.post(path, json={"model": "demo", "logprobs": True, "top_logprobs": 21} | body)
    assert (answer.status_code, "top_logprobs" in answer.json()["error"]) == (400, True)


def test_options_and_formats_reach_the_engine(server: Any, client: TestClient) -> None:
    options = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 4, "stop": ["x"], "num_predict": -1}
    options |= {"repeat_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4, "num_ctx": 9, "mirostat": 0}
    answer = client.post("/api/chat", json={"model": "demo", **HI, "options": options, "keep_alive": "5m"})
    assert answer.headers["x-quire-warnings"].endswith("'options.num_ctx'")
    params = server.core.requests[-1].task.params
    given = (params.temperature, params.top_k, params.top_p, params.min_p, params.seed, params.stop)
    assert given == (0.5, 7, 0.9, 0.1, 4, ["x"])
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.2, 0.3, 0.4)


def test_prompts(server: Any, client: TestClient) -> None:
    post(client, "/api/generate", prompt="Hi", system="Be brief.")
    assert prompt_of(server) == "<|endoftext|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"
    post(client, "/api/generate", prompt="Hi", raw=True)
    assert prompt_of(server) == "<|endoftext|>Hi"


def test_nothing_to_answer_loads_the_model(server: Any, client: TestClient) -> None:
    for path, empty in (("/api/chat", {"message": {"role": "assistant", "content": ""}}), ("/api/generate", {})):
        answer = post(client, path, stream=True)
        assert (answer["done"], answer["done_reason"]) == (True, "load")
        assert empty.items() <= answer.items()
    assert server.core.requests == []


@pytest.fixture
def thinker(make_server: Callable[..., Any]) -> Iterator[TestClient]:
    server = make_server(tool_call_parser="hermes", reasoning_parser="qwen3")
    call = '<tool_call>\n{"name": "look", "arguments": {"where": "a {}"}}\n</tool_call>\n'
    server.core.texts = [f"<think>\nLet me see.\n</think>\n\nI look.\n{call}{call}"]
    with TestClient(server.app) as client:
        yield client


def test_thoughts_and_calls(thinker: TestClient) -> None:
    whole = post(thinker, "/api/chat", **HI, tools=[LOOK])["message"]
    called = [{"function": {"index": n, "name": "look", "arguments": {"where": "a {}"}}} for n in (0, 1)]
    assert (whole["thinking"].strip(), whole["content"].strip()) == ("Let me see.", "I look.")
    assert len({call.pop("id") for call in whole["tool_calls"]}) == 2
    assert whole["tool_calls"] == called
    messages = [piece["message"] for piece in lines(thinker, "/api/chat", **HI, tools=[LOOK])]
    assert "".join(message.get("thinking", "") for message in messages) == whole["thinking"]
    assert "".join(message["content"] for message in messages) == whole["content"]
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    assert len({call.pop("id") for call in calls}) == 2
    assert calls == called  # Open WebUI puts pieces of one number together
    generated = post(thinker, "/api/generate", prompt="Hi")
    assert generated["thinking"].strip() == "Let me see."


def test_arguments_that_are_no_unicode_are_none(make_server: Callable[..., Any]) -> None:
    """Half of a surrogate pair, which JSON's text can hold and no answer's: nor is it /v1/messages'."""
    server = make_server(tool_call_parser="hermes")
    server.core.texts = ['<tool_call>{"name": "look", "arguments": {"where": "\\ud83d"}}</tool_call>']
    with TestClient(server.app) as client:
        assert "tool_calls" not in post(client, "/api/chat", **HI, tools=[LOOK])["message"]
        assert lines(client, "/api/chat", **HI, tools=[LOOK])[-1]["done"] is True
        tools = [{"name": "look", "input_schema": {"type": "object"}}]
        answer = client.post("/v1/messages", json={**HI, "max_tokens": 90, "tools": tools})
        assert [block.get("input") for block in answer.json()["content"]] == [{}]


def test_a_call_that_the_length_cuts_is_none(thinker: TestClient) -> None:
    """Its arguments are no object: who trusts what is there would call the function without them."""
    whole = post(thinker, "/api/chat", **HI, tools=[LOOK])
    found: list[int] = []
    for length in range(1, whole["eval_count"] + 1):
        cut = post(thinker, "/api/chat", **HI, tools=[LOOK], options={"num_predict": length})
        calls = cut["message"].get("tool_calls", [])
        assert {call["function"]["arguments"].get("where") for call in calls} <= {"a {}"}
        *pieces, last = lines(thinker, "/api/chat", **HI, tools=[LOOK], options={"num_predict": length})
        assert sum(len(piece["message"].get("tool_calls", [])) for piece in pieces) == len(calls)
        found.append(len(calls))
    assert (sorted(found), {*found}) == (found, {0, 1, 2})


def test_results_find_their_calls() -> None:
    calls = [{"function": {"name": name, "arguments": {"n": 1}}} for name in ("add", "sub", "add")]
    given = [
        OllamaMessage(role="assistant", tool_calls=calls),
        OllamaMessage(role="tool", content="3", tool_name="sub"),
        OllamaMessage(role="tool", content="1"),
        OllamaMessage(role="tool", content="2"),
    ]
    first, *results = _messages(given)
    ids = [call["id"] for call in first["tool_calls"]]
    assert len(set(ids)) == 3
    assert [call["function"]["arguments"] for call in first["tool_calls"]] == ['{"n": 1}'] * 3
    assert [message["tool_call_id"] for message in results] == [ids[1], ids[0], ids[2]]
    named = OllamaMessage(role="assistant", tool_calls=[call | {"id": f"c{n}"} for n, call in enumerate(calls)])
    _, *others = _messages([named, *(OllamaMessage(role="tool", tool_call_id=id) for id in ("c2", "c0"))])
    assert [(other["tool_call_id"], other["name"]) for other in others] == [("c2", "add"), ("c0", "add")]


def test_results_may_come_without_their_calls(server: Any, client: TestClient) -> None:
    """Continue's editors leave an assistant's calls out, and Ollama does not miss them."""
    said = [{"role": "assistant", "content": "I look."}, {"role": "tool", "content": "A cat.", "tool_name": "look"}]
    (result,) = _messages([OllamaMessage(role="tool", content="A cat.", tool_name="look")])
    assert result["name"] == "look"
    post(client, "/api/chat", messages=[*HI["messages"], *said])
    assert prompt_of(server).endswith("<|assistant|>I look.<|end|><|tool|>A cat.<|end|><|assistant|>")


def test_thoughts_go_back_to_the_template() -> None:
    (message,) = _messages([OllamaMessage(role="assistant", content="4", thinking="2 + 2")])
    assert message == {"role": "assistant", "content": "4", "thinking": "2 + 2"}


def test_what_clients_ask_first(client: TestClient) -> None:
    model = client.get("/api/tags").json()["models"][0]
    assert (model["name"], model["model"], model["details"]["family"]) == ("demo:latest", "demo:latest", "llama")
    assert model["size"] > 1e6
    assert model["details"]["parameter_size"] == "4.74M"
    assert client.get("/api/ps").json()["models"][0]["context_length"] == 128
    assert client.get("/api/version").json()["version"]
    assert client.head("/").status_code == 200
    shown = client.post("/api/show", json={"model": "demo:latest"}).json()
    assert (shown["model_info"]["llama.context_length"], shown["parameters"]) == (128, "num_ctx 128")
    assert (shown["capabilities"], "message" in shown["template"]) == (["completion"], True)
    assert post(client, "/api/chat", **HI, model="demo:latest")["model"] == "demo"


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (8_030_261_248, "8.0B"),
        (8_000_000_000, "8B"),
        (595_776_512, "595.78M"),
        (2_000_000, "2M"),
        (134_600, "135K"),
        (999, "999"),
        (0, ""),
    ],
)
def test_numbers_are_written_as_ollamas(number: int, shown: str) -> None:
    assert _in_short(number) == shown


def test_shapes_of_codes_are_no_count_of_parameters(server: Any, client: TestClient) -> None:
    server.llm.config.model.hf_config["quantization_config"] = {"quant_method": "awq"}
    assert client.get("/api/tags").json()["models"][0]["details"]["parameter_size"] == ""


def test_curl_needs_no_content_type_and_a_foreign_page_does(client: TestClient) -> None:
    body, form = json.dumps({"model": "demo", **HI}), {"content-type": "application/x-www-form-urlencoded"}
    assert client.post("/api/chat", content=body, headers=form).status_code == 200
    for header in ("origin", "sec-fetch-site"):
        refused = client.post("/api/chat", content=body, headers=form | {header: "http://evil"})
        assert (refused.status_code, "must be JSON" in refused.json()["error"]) == (415, True)
    assert client.post("/v1/chat/completions", content=body, headers=form).status_code == 415


REFUSALS: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "a model": ("chat", {"model": "other"}, 404, "'other' does not exist"),
    "an option": ("chat", {"options": {"temperature": -1}}, 400, "options.temperature"),
    "an option's type": ("chat", {"options": {"num_predict": "x"}}, 400, "options.num_predict"),
    "a sampler": ("generate", {"prompt": "a", "options": {"mirostat": 2}}, 400, "options.mirostat"),
    "a stop of a raw prompt": (
        "generate",
        {"prompt": "a", "raw": True, "options": {"stop": [""]}},
        400,
        "options.stop",
    ),
    "an image": ("chat", {"messages": [{"role": "user", "content": "a", "images": ["x"]}]}, 400, "takes text only"),
    "a suffix": ("generate", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    "a template": ("generate", {"prompt": "a", "template": "{{ .Prompt }}"}, 400, "template"),
    "a format": ("chat", {"format": "xml"}, 400, "format must be 'json' or a schema"),
    "thinking": ("chat", {"think": True}, 400, "think is of no use"),
    "a call": ("chat", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400, "messages[0].tool_calls[0]"),
    "a vector of nothing": ("embed", {"input": []}, 400, "input"),
    "a vector that is too long": ("embed", {"input": "a", "dimensions": 999}, 400, "dimensions = 999 is more than"),
    "a text that is too long": ("embed", {"input": "a " * 500, "truncate": False}, 400, "maximum context length"),
    "tools": ("chat", {"tools": [LOOK]}, 400, "does not support tools"),  # what Ollama says, and clients look for
    "to pull": ("pull", {}, 404, "quire pull"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(client: TestClient, name: str) -> None:
    path, body, status, shown = REFUSALS[name]
    answer = client.post(f"/api/{path}", json={"model": "demo", **HI} | body)
    assert answer.status_code == status, answer.text
    assert shown in answer.json()["error"]


def test_a_failure_in_mid_stream_is_a_line(server: Any, client: TestClient) -> None:
    server.core.ending = "error"
    *_, last = lines(client, "/api/chat", **HI)
    assert [*last] == ["error"]


def test_keys_and_unknown_routes_have_its_errors(make_server: Callable[..., Any]) -> None:
    with TestClient(make_server(api_key=["a"]).app) as client:
        refused = client.get("/api/tags")
        assert (refused.status_code, "API key" in refused.json()["error"]) == (401, True)
        missing = client.get("/api/nothing", headers={"authorization": "Bearer a"})
        assert (missing.status_code, "no such route" in missing.json()["error"]) == (404, True)
