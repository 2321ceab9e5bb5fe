"""Every parameter reaches the engine as it was given, under both routes; defaults are the model's."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from quire.entrypoints.server.chat_request import ChatCompletionRequest
from quire.entrypoints.server.completion_request import CompletionRequest, OtherCompletion
from quire.entrypoints.server.sampling import chat_params, completion_params
from quire.errors import InvalidRequestError
from quire.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from quire.text.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "Hi"}]

# field -> values that are passed on under the same name
SAME: dict[str, list[Any]] = {
    "n": [1, 3],
    "best_of": [2],
    "temperature": [0.5, 1, 0],
    "top_p": [0.5, 1],
    "top_k": [5, 0, -1],
    "min_p": [0.1, 0],
    "presence_penalty": [-2, 1.5],
    "frequency_penalty": [2, -0.5],
    "repetition_penalty": [1.3],
    "seed": [0, 7, 2**64 - 1],
    "stop": [["a", "b"], [], ["x"] * 64],
    "stop_token_ids": [[5, 6]],
    "bad_words": [["bad", "worse"]],
    "allowed_token_ids": [[5, 6]],
    "include_stop_str_in_output": [True],
    "ignore_eos": [True],
    "min_tokens": [2],
    "max_tokens": [1, 9],
    "skip_special_tokens": [False],
    "spaces_between_special_tokens": [False],
    "speculative": [False],
    "truncate_prompt_tokens": [3, -1],
    "prompt_logprobs": [0, 20],
}
BEAMS = {"use_beam_search": [True], "length_penalty": [-2, 0.5], "early_stopping": [True, False, "never"]}


def completion(server: Any, **body: Any) -> SamplingParams:
    return completion_params(CompletionRequest.model_validate({"prompt": "Hi"} | body), server.llm)


def chat(server: Any, **body: Any) -> SamplingParams:
    return chat_params(ChatCompletionRequest.model_validate({"messages": MESSAGES} | body), server.llm)


@pytest.mark.parametrize("read", [completion, chat])
@pytest.mark.parametrize("field", SAME)
def test_passed_on(server: Any, read: Callable[..., SamplingParams], field: str) -> None:
    for value in SAME[field]:
        assert getattr(read(server, **{field: value}), field) == value


@pytest.mark.parametrize("read", [completion, chat])
@pytest.mark.parametrize("field", BEAMS)
def test_beams_are_passed_on(server: Any, read: Callable[..., SamplingParams], field: str) -> None:
    """With temperature 0 unless the body says otherwise, which is refused, and none of the model's own parameters."""
    for value in BEAMS[field]:
        params = read(server, **({"use_beam_search": True, "best_of": 3, "n": 2} | {field: value}))
        assert getattr(params, field) == value
        assert (params.n, params.best_of, params.temperature, params.top_k, params.seed) == (2, 3, 0.0, 0, None)
    assert read(server, use_beam_search=False).use_beam_search is False
    with pytest.raises(InvalidRequestError, match="temperature must be 0.0 with use_beam_search .*; it is 0.5"):
        read(server, use_beam_search=True, temperature=0.5)


def test_nothing_is_forgotten() -> None:
    """A field of SamplingParams is read from requests, made of others, or refused."""
    made = {"logprobs", "output_kind", "detokenize", "structured_outputs"}
    refused = {"logits_processors", "guided_decoding", "extra_args"}
    assert set(SamplingParams.__struct_fields__) == set(SAME) | set(BEAMS) | {"logit_bias"} | made | refused


SCHEMA = {"type": "object"}
STRUCTURES: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"json": SCHEMA, "strict": True},
    ),
    (
        {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
        {"structural_tag": {"type": "structural_tag", "format": {"type": "any_text"}}},
    ),
    ({"structured_outputs": {"choice": ["a"]}}, {"choice": ["a"]}),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": " "}, {"json": SCHEMA, "whitespace_pattern": " "}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a", "b"], "response_format": {"type": "text"}}, {"choice": ["a", "b"]}),
    ({"guided_grammar": "root ::= x"}, {"grammar": "root ::= x"}),
    ({"json_schema": SCHEMA}, {"json": SCHEMA}),
    ({"grammar": "root ::= x"}, {"grammar": "root ::= x"}),
]


@pytest.mark.parametrize(("body", "fields"), STRUCTURES)
def test_structures(server: Any, body: dict[str, Any], fields: dict[str, Any] | None) -> None:
    expected = None if fields is None else StructuredOutputsParams(**fields)
    assert completion(server, **body).structured_outputs == chat(server, **body).structured_outputs == expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_object"}, "guided_regex": "x"}, "guided_regex"),
        ({"structured_outputs": {"json": {}, "regex": "a+"}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a+"}}, "structured_outputs"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
            "response_format",
        ),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": "["}, "guided_json"),
    ],
)
def test_structures_of_another_form(server: Any, body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(server, **body)
    assert caught.value.param == param


def test_other_spellings(server: Any) -> None:
    assert completion(server, stop="x").stop == ["x"]
    assert completion(server, logit_bias={"5": -200, "6": 1}).logit_bias == {5: -100.0, 6: 1.0}
    assert completion(server, seed=-1).seed is None
    assert completion(server, stream=True).output_kind == RequestOutputKind.DELTA
    assert completion(server).output_kind == RequestOutputKind.FINAL_ONLY


def test_logprobs(server: Any) -> None:
    assert [completion(server, logprobs=k).logprobs for k in (None, 0, 20)] == [None, 0, 20]
    assert completion(server, logprobs=2).prompt_logprobs is None
    assert completion(server, logprobs=2, echo=True).prompt_logprobs == 2
    assert completion(server, logprobs=2, echo=True, prompt_logprobs=5).prompt_logprobs == 5
    assert completion(server, echo=True).prompt_logprobs is None
    assert chat(server, logprobs=True).logprobs == 0
    assert chat(server, logprobs=True, top_logprobs=3).logprobs == 3
    assert chat(server, logprobs=False).logprobs is None


def test_output_lengths(server: Any) -> None:
    assert completion(server).max_tokens == 16
    assert completion(server, max_tokens=0, echo=True).max_tokens == 1
    assert chat(server).max_tokens is None
    assert chat(server, max_tokens=5).max_tokens == 5
    assert chat(server, max_tokens=5, max_completion_tokens=7).max_tokens == 7


def test_the_models_defaults(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"temperature": 0.3, "top_k": 7, "max_new_tokens": 40}
    defaults = server.llm.config.model.generation_defaults
    for name, value in given.items():
        monkeypatch.setitem(defaults, name, value)
    for read, length in ((completion, 16), (chat, 40)):
        params = read(server)
        assert (params.temperature, params.top_k, params.max_tokens) == (0.3, 7, length)
        params = read(server, temperature=1.0, max_tokens=50)
        assert (params.temperature, params.top_k, params.max_tokens) == (1.0, 7, 50)
    monkeypatch.setitem(defaults, "max_new_tokens", 9)
    assert completion(server).max_tokens == 9
    assert {**defaults} == {**given, "max_new_tokens": 9}, "the defaults are nobody's to change"


@pytest.mark.parametrize("of_folder", [False, True])
def test_the_operators_max_new_tokens_is_a_limit(
    make_server: Callable[..., Any], tmp_path: Path, of_folder: bool
) -> None:
    """As in vLLM; what the model's own generation_config.json says is a default."""

    def server_of(limit: int) -> Any:
        (tmp_path / "generation_config.json").write_text(json.dumps({"max_new_tokens": limit}))
        named = {"generation_config": str(tmp_path)}
        return make_server(named if of_folder else {"override_generation_config": {"max_new_tokens": limit}})

    server = server_of(9)
    for read in (completion, chat):
        assert read(server).max_tokens == 9
        assert read(server, max_tokens=50).max_tokens == 9
        assert read(server, max_tokens=5).max_tokens == 5
        assert read(server, max_tokens=50, use_beam_search=True, n=2).max_tokens == 9
    assert chat(server, max_completion_tokens=50).max_tokens == 9
    assert (
        completion_params(OtherCompletion.model_validate({"prompt": "Hi", "max_tokens": -1}), server.llm).max_tokens
        == 9
    )
    server = server_of(40)
    assert completion(server).max_tokens == 16
    assert [read(server, max_tokens=50).max_tokens for read in (completion, chat)] == [40, 40]


def test_more_logprobs_where_the_engine_gives_them(make_server: Callable[..., Any]) -> None:
    server = make_server({"max_logprobs": 40})
    assert completion(server, logprobs=40).logprobs == 40
    assert chat(server, logprobs=True, top_logprobs=40).logprobs == 40
    for most in (-1, 4096):
        server = make_server({"max_logprobs": most})
        assert completion(server, logprobs=-1, prompt_logprobs=-1).logprobs == -1
        assert chat(server, logprobs=True, top_logprobs=-1).logprobs == -1


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "Hi"}), ("/v1/chat/completions", {"messages": MESSAGES})]
)
def test_what_a_client_calls_its_requests_is_no_seed(client: TestClient, server: Any, path: str, body: Any) -> None:
    """A proxy gives one id to all requests of a trace; they are to draw differently."""
    for _ in range(3):
        client.post(path, json=body, headers={"X-Request-Id": "trace-7"})
        client.post(path, json=body | {"request_id": "mine"})
    client.post("/v1/completions", json={"prompt": ["Hi", "Hi"]})
    assert len({request.task.seed for request in server.core.requests}) == 8
    for _ in range(2):
        client.post(path, json=body | {"seed": 5})
    assert [request.task.seed for request in server.core.requests[-2:]] == [5, 5]


# --- what is no sampling parameter


def test_priority(make_server: Callable[..., Any]) -> None:
    server = make_server({"scheduling_policy": "priority"})
    with TestClient(server.app) as client:
        client.post("/v1/completions", json={"prompt": "Hi", "priority": -3})
        client.post("/v1/chat/completions", json={"messages": MESSAGES, "priority": 4})
    assert [request.priority for request in server.core.requests] == [-3, 4]


def test_cache_salt(client: TestClient, server: Any) -> None:
    client.post("/v1/completions", json={"prompt": ["Hi", "Ho"], "cache_salt": "s"})
    client.post("/v1/chat/completions", json={"messages": MESSAGES, "cache_salt": "s"})
    assert [request.cache_salt for request in server.core.requests] == ["s"] * 3


def test_special_tokens(client: TestClient, server: Any, demo_tokenizer: Tokenizer) -> None:
    for value in (None, True, False):
        client.post("/v1/completions", json={"prompt": "Hi", "add_special_tokens": value})
        client.post("/v1/chat/completions", json={"messages": MESSAGES, "add_special_tokens": value})
    ids = [request.prompt_token_ids for request in server.core.requests]
    plain, special = demo_tokenizer.encode("Hi", add_special_tokens=False), demo_tokenizer.encode("Hi")
    assert ids[0::2] == [special, special, plain]
    assert ids[1] == ids[5] == ids[3][1:]


def test_prompts(client: TestClient, server: Any, demo_tokenizer: Tokenizer) -> None:
    for prompt in ("Hi there", [5, 6, 7]):
        client.post("/v1/completions", json={"prompt": prompt})
        client.post("/v1/completions", json={"prompt": prompt, "truncate_prompt_tokens": 2})
    text = demo_tokenizer.encode("Hi there")
    expected = [text, text[-2:], [5, 6, 7], [6, 7]]
    assert [request.prompt_token_ids for request in server.core.requests] == expected


def test_a_long_prompt_is_cut_to_the_context(client: TestClient, server: Any) -> None:
    answer = client.post("/v1/completions", json={"prompt": [5] * 300, "truncate_prompt_tokens": -1})
    assert answer.json()["usage"]["prompt_tokens"] == 127
    answer = client.post("/v1/completions", json={"prompt": [5] * 300, "truncate_prompt_tokens": 100, "max_tokens": 28})
    assert answer.status_code == 200
    for limit, kept in ((28, 100), (127, 1)):  # beside as many tokens as are asked for
        body = {"prompt": [5] * 300, "truncate_prompt_tokens": -1, "max_tokens": limit}
        assert client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"] == kept
    refused = client.post("/v1/completions", json=body | {"max_tokens": 128}).json()["error"]
    assert (refused["param"], refused["code"]) == ("max_tokens", "context_length_exceeded")


def test_long_texts_are_encoded_off_the_loop(client: TestClient, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    encode = server.llm.tokenizer.encode

    def noted(text: str, add_special_tokens: bool = True) -> list[int]:
        if text.startswith("word"):
            threads.append(threading.current_thread().name)
        return encode(text, add_special_tokens)

    monkeypatch.setattr(server.llm.tokenizer, "encode", noted)
    answer = client.post("/v1/completions", json={"prompt": "word " * 2000, "truncate_prompt_tokens": 5})
    assert answer.status_code == 200
    assert len(threads) == 1
    assert threads[0].startswith("quire-encode")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_texts_without_a_chance_are_not_encoded(
    client: TestClient, server: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(server.llm.tokenizer, "encode", lambda *_: pytest.fail("encoded"))
    text = "word " * 1_000_000
    answer = client.post(path, json={"prompt": text, "messages": [{"role": "user", "content": text}]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 128 tokens" in error["message"]


def test_texts_with_a_chance_are(client: TestClient, server: Any, demo_tokenizer: Tokenizer) -> None:
    """The longest there is to a token."""
    longest = max((demo_tokenizer.decode([i]) for i in range(len(demo_tokenizer))), key=len)
    assert (
        client.post("/v1/completions", json={"prompt": longest * 120, "add_special_tokens": False}).status_code == 200
    )
    assert len(server.request.prompt_token_ids) <= 120


def test_whose_a_request_is(make_server: Callable[..., Any]) -> None:
    """Its key's, and where there are no keys, its user's; neither a key nor a long name goes further down."""
    server = make_server({"scheduling_policy": "fair"})
    with TestClient(server.app) as client:
        client.post("/v1/completions", json={"prompt": "Hi", "user": "me"})
        client.post("/v1/chat/completions", json={"messages": MESSAGES, "user": "x" * 1000})
        client.post("/v1/completions", json={"prompt": "Hi", "user": ""})
    clients = [request.client for request in server.core.requests]
    assert clients[0] == "me"
    assert len(clients[1]) == 64
    assert clients[2] is None


def test_a_key_says_whose_a_request_is(make_server: Callable[..., Any]) -> None:
    server = make_server({"scheduling_policy": "fair"}, api_key=["sk-1", "sk-2"])
    with TestClient(server.app) as client:
        for key in ("sk-1", "sk-2", "sk-1"):
            body = {"prompt": "Hi", "user": "somebody else"}
            client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    clients = [request.client for request in server.core.requests]
    assert clients[0] == clients[2] != clients[1]
    assert not any("sk-" in name or "somebody" in name for name in clients)


def test_targets(make_server: Callable[..., Any]) -> None:
    server = make_server({"scheduling_policy": "deadline"})
    with TestClient(server.app) as client:
        client.post("/v1/completions", json={"prompt": "Hi", "ttft_target": 0.5, "tpot_target": 0.25})
    (request,) = server.core.requests
    assert (request.ttft_target, request.tpot_target) == (0.5, 0.25)
