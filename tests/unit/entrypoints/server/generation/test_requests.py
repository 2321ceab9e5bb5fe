"""What is refused, with which status and `param`; what passes for nothing; and what the OpenAPI description lists."""

import json
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from fastapi.testclient import TestClient
from pydantic import ValidationError

from quire.entrypoints.server.chat_request import ChatCompletionRequest
from quire.entrypoints.server.completion_request import CompletionRequest
from quire.entrypoints.server.unknown_fields import unknown_fields

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
PLAIN: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "Hi"}, CHAT: {"messages": USER}}


F: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
G: dict[str, Any] = {"type": "function", "function": {"name": "g"}}

# For both routes: what is wrong, and the field that the error names.
WRONG_IN_BOTH: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": 2**63}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": -2.1}, "presence_penalty"),
    ({"frequency_penalty": 2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"best_of": 129}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "x"}, "max_tokens"),
    ({"max_tokens": 5.5}, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": "x" * 1_000_000}, "stop"),
    ({"stop": 5}, "stop"),
    ({"bad_words": ["x"] * 129}, "bad_words"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"4096": 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"logit_bias": {"5": "x"}}, "logit_bias"),
    ({"stop_token_ids": [4096]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [5, 4096]}, "allowed_token_ids"),
    ({"allowed_token_ids": [5] * 8193}, "allowed_token_ids"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 129}, "truncate_prompt_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"stream": "yes"}, "stream"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"request_id": ""}, "request_id"),
    ({"request_id": "a\nb"}, "request_id"),
    ({"request_id": "\x9b2K"}, "request_id"),
    ({"request_id": "a\u2028b"}, "request_id"),
    ({"request_id": "\u202e"}, "request_id"),
    ({"priority": 1}, "priority"),
    ({"priority": 2**63}, "priority"),
    ({"echo": 1}, "echo"),
    ({"user": 5}, "user"),
    ({"model": 5}, "model"),
    ({"use_beam_search": "yes"}, "use_beam_search"),
    ({"use_beam_search": True, "stream": True}, "use_beam_search"),
    ({"use_beam_search": True, "temperature": 1}, "temperature"),
    ({"use_beam_search": True, "top_p": 0.9}, "top_p"),
    ({"use_beam_search": True, "seed": 1}, "seed"),
    ({"use_beam_search": True, "stop": "x"}, "stop"),
    ({"use_beam_search": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"use_beam_search": True, "presence_penalty": 1}, "presence_penalty"),
    ({"use_beam_search": True, "logit_bias": {"5": 1}}, "logit_bias"),
    ({"use_beam_search": True, "n": 3, "best_of": 2}, "best_of"),
    ({"use_beam_search": True, "n": 0}, "n"),
    ({"use_beam_search": True, "length_penalty": 11}, "length_penalty"),
    ({"use_beam_search": True, "early_stopping": "often"}, "early_stopping"),
    ({"early_stopping": True}, "early_stopping"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    ({"structured_outputs": {"json": {}, "regex": "a+"}}, "structured_outputs"),
    ({"guided_json": [{"type": "object"}]}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_choice": ["a", ""]}, "guided_choice"),
    ({"guided_grammar": 5}, "guided_grammar"),
    ({"logits_processors": ["x"]}, "logits_processors"),
    ({"moderation": {"model": "x"}}, "moderation"),
    ({"logprob_token_ids": [5]}, "logprob_token_ids"),
    ({"truncation_side": "right"}, "truncation_side"),
    ({"json_schema": "x"}, "json_schema"),
    ({"grammar": ""}, "grammar"),
]
WRONG_IN_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": ["a", [5]]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [4096]}, "prompt"),
    ({"prompt": [2**70]}, "prompt"),
    ({"prompt": [1.0]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": [[1], [True]]}, "prompt"),
    ({"prompt": [[1], "x"]}, "prompt"),
    ({"prompt": ["x"] * 1025}, "prompt"),
    ({"suffix": "the end"}, "suffix"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -2}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21, "echo": True}, "logprobs"),
]
WRONG_IN_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "r" * 65, "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
    ({"messages": IMAGE}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"chat_template_kwargs": {"chat_template": "{{ messages }}"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": ["x"]}, "tools[0]"),
    ({"tools": [{}]}, "tools"),
    ({"tools": [{}], "tool_choice": None}, "tools"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools"),
    ({"tools": [F, F], "tool_choice": "required"}, "tools"),
    ({"tools": [F]}, "tools"),  # the demo's template has no format of calls
    ({"tools": [F], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [F], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": [F], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, "tool_choice"),
    (
        {
            "tools": [F],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [G]}},
        },
        "tool_choice",
    ),
    ({"thinking_token_budget": 8}, "thinking_token_budget"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"mm_processor_kwargs": {"x": 1}}, "mm_processor_kwargs"),
]
WRONG = [(path, *case) for path in (COMPLETIONS, CHAT) for case in WRONG_IN_BOTH]
WRONG += [(COMPLETIONS, *case) for case in WRONG_IN_COMPLETIONS] + [(CHAT, *case) for case in WRONG_IN_CHAT]


@pytest.mark.parametrize(("path", "body", "param"), WRONG, ids=lambda value: json.dumps(value)[:60])
def test_refused(shared_client: TestClient, shared_server: Any, path: str, body: dict[str, Any], param: str) -> None:
    answer = shared_client.post(path, json=PLAIN[path] | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert len(error["message"]) < 500
    assert "Value error" not in error["message"]
    assert shared_server.core.requests == []
    assert shared_server.llm.num_unfinished == 0


def test_bounds_are_named(client: TestClient) -> None:
    over = [({"n": 129}, "128"), ({"stop": ["x"] * 65}, "64"), ({"prompt": ["x"] * 1025}, "1024")]
    over += [({"bad_words": ["x"] * 129}, "128"), ({"logprobs": 21}, "20")]
    for body, bound in over:
        assert bound in client.post(COMPLETIONS, json=PLAIN[COMPLETIONS] | body).json()["error"]["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_no_model_is_the_first(client: TestClient, path: str) -> None:
    """Left out, null or empty, as in vLLM."""
    for given in ({}, {"model": None}, {"model": ""}):
        assert client.post(path, json=PLAIN[path] | given).json()["model"] == "demo"


def test_missing_and_unknown(client: TestClient) -> None:
    for path, field in ((COMPLETIONS, "prompt"), (CHAT, "messages")):
        answer = client.post(path, json={})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        answer = client.post(path, json=PLAIN[path] | {"model": "gpt-5"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_context(client: TestClient, server: Any, path: str) -> None:
    """128 tokens."""
    fields = {COMPLETIONS: ("prompt", "max_tokens"), CHAT: ("messages", "max_completion_tokens")}[path]
    long = "word " * 200
    for body, param in (
        ({"prompt": long} if path == COMPLETIONS else {"messages": [{"role": "user", "content": long}]}, fields[0]),
        ({fields[1]: 128}, fields[1]),
        ({fields[1]: 2**62}, fields[1]),
    ):
        answer = client.post(path, json=PLAIN[path] | body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, param, "context_length_exceeded")
        assert "maximum context length is 128 tokens" in error["message"]
    assert server.core.requests == []


def test_max_tokens_may_fill_the_context(client: TestClient, server: Any) -> None:
    assert client.post(COMPLETIONS, json={"prompt": [5] * 100, "max_tokens": 28}).status_code == 200
    assert client.post(COMPLETIONS, json={"prompt": [5] * 100, "max_tokens": 29}).status_code == 400
    assert client.post(COMPLETIONS, json={"prompt": [5] * 120}).status_code == 200  # 16 is only the default
    assert server.core.requests[-1].task.max_tokens == 8


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_of_no_use_to_the_template_is_ignored_and_noted(
    client: TestClient, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients send an effort to any model."""
    caplog.set_level(logging.WARNING, "quire")
    efforts = {"reasoning_effort": "high", "verbosity": "low", "stream": stream}
    answer = client.post(CHAT, json=PLAIN[CHAT] | efforts)
    told = "unknown fields, which are ignored: 'reasoning_effort', 'verbosity'"
    assert (answer.status_code, answer.headers["x-quire-warnings"]) == (200, told)
    assert caplog.messages == [f"a request has {told}"]
    body = {"input": "Hi", "reasoning": {"effort": "high"}, "text": {"verbosity": "low"}, "stream": stream}
    answer = client.post("/v1/responses", json=body)
    assert answer.status_code == 200
    assert answer.headers["x-quire-warnings"] == (
        "unknown fields, which are ignored: 'reasoning.effort', 'text.verbosity'"
    )
    assert caplog.messages[1:] == [f"a request has {answer.headers['x-quire-warnings']}"]


def test_tools_and_documents_that_the_template_does_not_show(client: TestClient) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    given = {"tools": tools, "tool_choice": "required", "documents": [{"title": "a", "text": "b"}]}
    answer = client.post(CHAT, json=PLAIN[CHAT] | given)
    told = "unknown fields, which are ignored: 'tools (in the prompt)', 'documents'"
    assert (answer.status_code, answer.headers["x-quire-warnings"]) == (200, told)
    shown = {"tools": [], "documents": None}
    assert "x-quire-warnings" not in client.post(CHAT, json=PLAIN[CHAT] | shown).headers


HARMLESS: dict[str, Any] = {
    "suffix": "",
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "response_format": {"type": "text"},
    "tool_choice": "none",
    "tools": [],
    "function_call": "none",
    "modalities": ["text"],
    "reasoning_effort": "none",
    "verbosity": "medium",
    "top_logprobs": 0,
    "priority": 0,
    "user": "someone",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"ttl": "30m"},
    "parallel_tool_calls": False,
    "stop": [],
    "truncation_side": "left",
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_null_is_the_default_and_harmless_values_pass(client: TestClient, server: Any, path: str) -> None:
    model = CompletionRequest if path == COMPLETIONS else ChatCompletionRequest
    bodies = [{}, {name: None for name in model.model_fields if name not in PLAIN[path]}]
    bodies.append({name: value for name, value in HARMLESS.items() if name in model.model_fields})
    for body in bodies:
        assert client.post(path, json=PLAIN[path] | body).status_code == 200
    first, *others = [msgspec.structs.replace(r.task.params, seed=None) for r in server.core.requests]
    assert others == [first] * 2


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_unknown_fields_are_noted(client: TestClient, path: str, caplog: pytest.LogCaptureFixture) -> None:
    """By a warning once a name, and to each client by a header."""
    caplog.set_level(logging.WARNING, "quire")
    body = PLAIN[path] | {"max_token": 5, "x\ny\u2028": {"deep": []}, "stream_options": {"usage": True}, "stream": True}
    told = r"unknown fields, which are ignored: 'max_token', 'x\ny\u2028', 'stream_options.usage'"
    for _ in range(2):
        answer = client.post(path, json=body)
        assert (answer.status_code, answer.headers["x-quire-warnings"]) == (200, told)
    assert [record.getMessage() for record in caplog.records] == [f"a request has {told}"]
    whole = client.post(path, json=PLAIN[path] | {"max_token": 5, "temprature": 0})
    assert whole.headers["x-quire-warnings"] == "unknown fields, which are ignored: 'max_token', 'temprature'"
    assert "'temprature'" in caplog.messages[-1]
    assert "x-quire-warnings" not in client.post(path, json=PLAIN[path]).headers


def test_unknown_fields_cannot_fill_the_log(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    names = [f"{'x' * 30}{i}" for i in range(2000)]
    answer = client.post(COMPLETIONS, json=PLAIN[COMPLETIONS] | dict.fromkeys(names, 1))
    assert len(answer.headers["x-quire-warnings"]) < 500
    for start in range(0, 1200, 20):
        client.post(COMPLETIONS, json=PLAIN[COMPLETIONS] | dict.fromkeys(names[start : start + 20], 1))
    assert len(caplog.records) <= 51
    assert all(len(message) < 500 for message in caplog.messages)


def test_a_million_unknown_fields_are_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    body, asked = CompletionRequest.model_validate({"prompt": "Hi"} | {f"x{i}": 1 for i in range(1000)}), list[str]()
    monkeypatch.setattr(CompletionRequest, "__getattr__", lambda _, name: asked.append(name), raising=False)
    assert len(unknown_fields(body)) == 1000
    assert not asked


def test_refusals_in_a_stream_are_plain(client: TestClient) -> None:
    for path in PLAIN:
        answer = client.post(path, json=PLAIN[path] | {"stream": True, "temperature": 0, "n": 2})
        assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")


def test_not_finite(client: TestClient) -> None:
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate({"prompt": "x", "temperature": float("nan")})
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate({"prompt": "x", "repetition_penalty": float("inf")})


def test_deep_messages(client: TestClient) -> None:
    """Nested within what JSON is decoded to, but deeper than most code can walk."""
    deep: Any = "x"
    for _ in range(400):
        deep = [deep]
    for message in ({"role": "user", "content": "Hi", "extra": deep}, {"role": "user", "content": [{"type": deep}]}):
        answer = client.post(CHAT, json={"messages": [message]})
        assert answer.status_code in (200, 400)


_BEYOND_OPENAI = """
top_k min_p repetition_penalty best_of use_beam_search length_penalty early_stopping stop_token_ids
include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
truncate_prompt_tokens prompt_logprobs
allowed_token_ids bad_words echo add_special_tokens priority request_id return_token_ids return_tokens_as_token_ids
cache_salt
"""


def test_the_description_has_every_parameter(client: TestClient) -> None:
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    beyond = set(_BEYOND_OPENAI.split())
    in_chat = ["add_generation_prompt", "continue_final_message", "chat_template_kwargs"]
    assert not beyond - set(schemas["CompletionRequest"]["properties"])
    assert not {*beyond, *in_chat} - set(schemas["ChatCompletionRequest"]["properties"])


def test_openais_parameters_are_all_known(openai_properties: Callable[[str], set[str]]) -> None:
    assert openai_properties("CreateCompletionRequest") <= set(CompletionRequest.model_fields)
    assert openai_properties("CreateChatCompletionRequest") <= set(ChatCompletionRequest.model_fields)


def test_prompts_with_tools_are_counted_for_any_model(client: TestClient) -> None:
    """The demo's template has no format of calls, which matters to answers only."""
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    responses, messages = {"type": "function", **F["function"]}, {"name": "f", "input_schema": {"type": "object"}}
    for path, body in [
        ("/v1/chat/completions/render", chat | {"tools": [F]}),
        ("/v1/messages/count_tokens", chat | {"tools": [messages]}),
        ("/v1/responses/input_tokens", {"input": "Hi", "tools": [responses]}),
    ]:
        assert client.post(path, json=body).status_code == 200
        wrong = client.post(path, json=body | {"tools": body["tools"] * 2})
        assert (wrong.status_code, "two of them" in wrong.text) == (400, True)


def test_structures_are_named_as_they_were_written(client: TestClient) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    for field, value, words in [
        ("structured_outputs", {"choice": []}, "structured_outputs.choice must be"),
        ("structured_outputs", {"jsn": {}}, "structured_outputs has no field 'jsn'. Did you mean 'json'"),
        ("guided_choice", [""], "guided_choice must be a list of non-empty"),
    ]:
        error = client.post("/v1/chat/completions", json=chat | {field: value}).json()["error"]
        assert (error["param"], error["message"][: len(words)]) == (field, words)


NEUTRAL = {
    **{
        "watermarking": None,
        "repetition_detection": None,
        "routed_experts_prompt_start": 0,
        "return_token_offsets": False,
    },
    **{"media_io_kwargs": {}, "mm_payload": "tensors", "return_mm_kwargs": None, "ec_transfer_params": None},
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_vllms_fields_that_ask_for_nothing(client: TestClient, path: str) -> None:
    body = {"prompt": "a"} if path == "/v1/completions" else {"input": "a"}
    body = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else body
    answer = client.post(path, json={**body, **NEUTRAL})
    assert (answer.status_code, answer.headers.get("x-quire-warnings")) == (200, None), answer.text
    assert client.post(path, json={**body, "thinking_token_budget": -1}).status_code == 200
    refused = client.post(path, json={**body, **NEUTRAL, "repetition_detection": {"min_count": 2}})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "not_supported")
    assert refused.json()["error"]["message"].startswith("repetition_detection is not supported yet: ")
    assert "'session_id'" in client.post(path, json={**body, "session_id": "x"}).headers["x-quire-warnings"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, '{"messages": M, "tools": [{"type": D}]}'),
        (CHAT, '{"messages": M, "stream": true, "response_format": {"type": D}}'),
        ("/v1/responses", '{"input": "a", "stream": true, "tools": [{"type": "namespace", "name": "a", "tools": D}]}'),
        ("/v1/messages", '{"messages": M, "max_tokens": 1, "metadata": {"user_id": D}}'),
    ],
)
def test_json_that_is_too_deep_is_refused_wherever_that_shows(shared_client: TestClient, path: str, body: str) -> None:
    """A body that can just be read is too deep for whatever goes deeper into it, or shows it."""
    told = set()
    for depth in range(700, 1000, 3):
        deep = '{"a":' * depth + "1" + "}" * depth
        headers = {"content-type": "application/json"}
        answer = shared_client.post(
            path, content=body.replace("D", deep).replace("M", json.dumps(USER)), headers=headers
        )
        told.add((answer.status_code, answer.json()["error"]["message"][:30]))
    assert {status for status, _ in told} == {400}
    assert (400, "the body's JSON is nested too ") in told
