"""llama.cpp's routes: /completion, whole and streamed, its prompts and names, and what its clients ask first."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel, ValidationError

from quire.entrypoints.server.llama_requests import LlamaCompletionRequest, LlamaEmbeddingRequest
from quire.entrypoints.server.ollama_requests import OllamaEmbedRequest, OllamaGenerateRequest

TEXT = "Once upon a time there was a café."


def post(client: TestClient, **body: Any) -> Any:
    answer = client.post("/completion", json={"prompt": "Hi"} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    answer = client.post("/completion", json={"prompt": "Hi", "stream": True} | body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(block.removeprefix("data: ")) for block in answer.text.split("\n\n")[:-1]]


ENDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "by itself": ({}, "eos", ""),
    "a stop string": ({"stop": ["upon"]}, "word", "upon"),
    "its length": ({"n_predict": 3}, "limit", ""),
    "more than the context": ({"n_predict": 10_000}, "eos", ""),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_stream_is_the_whole_in_pieces(client: TestClient, name: str) -> None:
    body, kind, word = ENDS[name]
    whole = post(client, **body)
    assert (whole["stop"], whole["stop_type"], whole["stopping_word"]) == (True, kind, word)
    assert TEXT.startswith(whole["content"])
    assert whole["timings"]["predicted_n"] == whole["tokens_predicted"]
    assert (whole["prompt"], whole["tokens"], whole["generation_settings"]["n"]) == ("Hi", [], 1)
    *pieces, last = stream(client, **body, return_tokens=True)
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert {piece["stop"] for piece in pieces} == {False}
    assert sum(len(piece["tokens"]) for piece in pieces) == last["tokens_predicted"] == whole["tokens_predicted"]
    assert (last["content"], last["stop"], last["stop_type"]) == ("", True, kind)


def test_prompts_of_all_kinds(server: Any, client: TestClient) -> None:
    tokenizer = server.core.tokenizer
    hi = tokenizer.encode("Hi", add_special_tokens=False)
    for prompt, expected in (
        ([5, 6], [[5, 6]]),
        (["Hi", 7, "Hi"], [[*tokenizer.encode("Hi", add_special_tokens=True), 7, *hi]]),
        ([7, "Hi"], [[7, *hi]]),
        (["Hi", "Hi"], [tokenizer.encode("Hi", add_special_tokens=True)] * 2),
        (["Hi", [5], [6, "Hi"]], [tokenizer.encode("Hi", add_special_tokens=True), [5], [6, *hi]]),
    ):
        server.core.requests.clear()
        answer = post(client, prompt=prompt)
        assert sorted(list(one.prompt_token_ids) for one in server.core.requests) == sorted(expected)
        answers = answer if isinstance(answer, list) else [answer]
        assert [one["index"] for one in answers] == list(range(len(expected)))
        assert {one["content"] for one in answers} == {TEXT}


def test_names_reach_the_engine(server: Any, client: TestClient) -> None:
    post(client, repeat_penalty=1.5, seed=-1, top_k=3, logit_bias=[[5, 1.5], [6, False]], ignore_eos=True, n_predict=4)
    params = server.core.requests[-1].task.params
    assert (params.repetition_penalty, params.top_k, params.ignore_eos, params.max_tokens) == (1.5, 3, True, 4)
    assert params.logit_bias == {5: 1.5, 6: -100.0}


def test_probabilities(client: TestClient) -> None:
    whole = post(client, n_predict=4, n_probs=2)["completion_probabilities"]
    assert len(whole) == 4
    assert all(one["logprob"] <= 0 and len(one["top_logprobs"]) == 2 for one in whole)
    for one in whole:  # the likeliest first, whichever was drawn
        ranked = [other["logprob"] for other in one["top_logprobs"]]
        assert ranked == sorted(ranked, reverse=True)
        assert ranked[0] > one["logprob"]
    assert all(bytes(one["bytes"]).decode(errors="replace") == one["token"] for one in whole)
    longer = post(client, n_predict=40, n_probs=1)
    told = bytes(byte for one in longer["completion_probabilities"] for byte in one["bytes"])
    assert told.decode().startswith(longer["content"])  # where characters are of several tokens, too
    assert any("\ufffd" in one["token"] for one in longer["completion_probabilities"])
    pieces = stream(client, n_predict=4, n_probs=2)
    assert [one for piece in pieces[:-1] for one in piece["completion_probabilities"]] == whole


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"n_predict": 0}, "n_predict"),
    "a temperature": ({"temperature": -1}, "temperature"),
    "a penalty": ({"repeat_penalty": 0}, "repeat_penalty"),
    "a sampler": ({"mirostat": 2}, "mirostat"),
    "images": ({"image_data": [{"data": "x", "id": 1}]}, "image_data"),
    "two grammars": ({"grammar": 'root ::= "a"', "json_schema": {}}, "json_schema and grammar"),
    "a bias": ({"logit_bias": [[1, 2, 3]]}, "logit_bias"),
    "no prompt": ({"prompt": []}, "prompt"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(client: TestClient, name: str) -> None:
    body, shown = REFUSALS[name]
    answer = client.post("/completion", json={"prompt": "Hi"} | body)
    assert answer.status_code == 400, answer.text
    assert shown in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("form", "fields"),
    [
        (LlamaCompletionRequest, {"prompt": [None] * 9999}),
        (LlamaCompletionRequest, {"prompt": [["a"] + [None] * 9999]}),
        (LlamaCompletionRequest, {"prompt": "a", "stop": [1] * 9999}),
        (LlamaCompletionRequest, {"prompt": "a", "logit_bias": [1] * 9999}),
        (LlamaCompletionRequest, {"prompt": "a", "logit_bias": [["a"] * 9999]}),
        (LlamaEmbeddingRequest, {"content": [None] * 9999}),
        (OllamaEmbedRequest, {"input": [1] * 9999}),
        (OllamaGenerateRequest, {"options": {"stop": [1] * 9999}}),
    ],
)
def test_thousands_of_wrong_items_are_not_as_many_errors(form: type[BaseModel], fields: dict[str, Any]) -> None:
    """Of a body's millions each would be a thousand bytes, and take as many microseconds."""
    with pytest.raises(ValidationError) as refused:
        form.model_validate(fields)
    assert refused.value.error_count() < 9


@pytest.mark.parametrize("path", ["/completion", "/embedding"])
def test_prompts_are_not_read_where_they_are_too_many_or_too_long(server: Any, client: TestClient, path: str) -> None:
    read: list[Any] = []
    encode = server.llm.token_ids

    async def note(text: str, *options: Any) -> list[int]:
        read.append(text)
        return await encode(text, *options)

    server.llm.token_ids = note
    name = "prompt" if path == "/completion" else "content"
    for prompts, most in (([["a"]] * 9999, 1025), ([5, "a"] * 9999, 200)):
        read.clear()
        answer = client.post(path, json={name: prompts})
        assert (answer.status_code, 0 < len(read) <= most) == (400, True)


def test_a_failure_in_mid_stream_is_an_event(server: Any, client: TestClient) -> None:
    server.core.ending = "error"
    *_, last = stream(client)
    assert last["error"]["code"] == 500


def test_what_clients_ask_about_a_server(client: TestClient) -> None:
    props = client.get("/props").json()
    assert (props["default_generation_settings"]["n_ctx"], props["model_alias"]) == (128, "demo")
    slots = client.get("/slots").json()
    assert (len(slots), {slot["is_processing"] for slot in slots}) == (props["total_slots"], {False})
    applied = client.post("/apply-template", json={"messages": [{"role": "user", "content": "Hi"}]})
    assert applied.json() == {"prompt": "<|endoftext|><|user|>Hi<|end|><|assistant|>"}
    useless = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "low"}
    assert "'reasoning_effort'" in client.post("/apply-template", json=useless).headers["x-quire-warnings"]
    refused = client.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
    assert (refused.status_code, "/infill is not supported" in refused.text) == (404, True)
    tokens = client.post("/tokenize", json={"content": "Hi"}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json()["content"] == "Hi"
    assert (
        len(client.post("/tokenize", json={"content": "Hi", "add_special": True}).json()["tokens"]) == len(tokens) + 1
    )


def test_sagemakers_route_is_both(client: TestClient) -> None:
    chat = client.post("/invocations", json={"messages": [{"role": "user", "content": "a"}]}).json()
    assert chat["choices"][0]["message"]["content"] == TEXT
    assert client.post("/invocations", json={"prompt": "a", "max_tokens": 99}).json()["choices"][0]["text"] == TEXT
    refused = client.post("/invocations", json={"prompt": 1.5})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
