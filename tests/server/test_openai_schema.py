"""Answers and stream chunks against OpenAI's published schema (../shared/data/openai/openapi.yaml)."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from serving import RunningServer

yaml = pytest.importorskip("yaml")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DRAWN = {"temperature": 1.0, "seed": 3, "n": 2}
TEXT_PARTS = [{"type": "text", "text": "What is"}, {"type": "text", "text": "in the box?"}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"where": "box"}'}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": TEXT_PARTS, "name": "ann"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "A cat.", "tool_call_id": "call_1"},
    {"role": "developer", "content": "Say it kindly."},
]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (COMPLETIONS, {"prompt": "Once upon"}),
    "texts": (COMPLETIONS, {"prompt": ["Once upon", "The old"]}),
    "token ids": (COMPLETIONS, {"prompt": [[5, 6], [7, 8, 9]], "return_token_ids": True}),
    "choices": (COMPLETIONS, {"prompt": "Once upon", **DRAWN}),
    "logprobs": (COMPLETIONS, {"prompt": "Once upon", "logprobs": 2}),
    "logprobs of no others": (COMPLETIONS, {"prompt": "Once upon", "logprobs": 0}),
    "unlikely tokens": (COMPLETIONS, {"prompt": "Once upon", "logprobs": 2, "allowed_token_ids": [9, 99]}),
    "stop": (COMPLETIONS, {"prompt": "Once upon", "stop": [" ", "e"]}),
    "echo": (COMPLETIONS, {"prompt": "Once upon", "echo": True}),
    "echo with logprobs": (COMPLETIONS, {"prompt": ["Once upon", "The"], "echo": True, "logprobs": 1}),
    "echo alone": (COMPLETIONS, {"prompt": "Once upon", "echo": True, "logprobs": 1, "max_tokens": 0}),
    "chat": (CHAT, {"messages": HISTORY[:1]}),
    "chat with tools": (CHAT, {"messages": HISTORY, "tools": [TOOL], "tool_choice": "none"}),
    "chat's choices": (CHAT, {"messages": HISTORY[:2], **DRAWN}),
    "chat's logprobs": (CHAT, {"messages": HISTORY[:2], "logprobs": True, "top_logprobs": 3}),
    "chat's logprobs of no others": (CHAT, {"messages": HISTORY[:2], "logprobs": True}),
    "chat goes on": (CHAT, {"messages": [*HISTORY[:2], {"role": "assistant", "content": "A"}]}),
    "chat of one token": (CHAT, {"messages": HISTORY[:2], "max_completion_tokens": 1}),
    "chat with ids": (CHAT, {"messages": HISTORY[:2], "return_token_ids": True}),
}
OPTIONS = [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]


@cache
def published(path: Path) -> dict[str, Any]:
    document = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    schemas = _with_nulls(document["components"]["schemas"])
    return {"components": {"schemas": schemas}}


def _with_nulls(schema: Any) -> Any:
    """OpenAPI 3.0's `nullable`, which the schema uses in places, as JSON Schema says it."""
    if isinstance(schema, list):
        return [_with_nulls(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _with_nulls(value) for key, value in schema.items() if key != "nullable"}
    return {"anyOf": [plain, {"type": "null"}]} if schema.get("nullable") is True else plain


@pytest.fixture
def check(shared_data: Path) -> Callable[[str, Any], None]:
    """Validates a value against one of the published schemas."""
    path = shared_data / "openai" / "openapi.yaml"
    if not path.is_file():
        pytest.skip("needs ../shared/data/openai/openapi.yaml")

    def validate(name: str, value: Any) -> None:
        schema = {**published(path), "$ref": f"#/components/schemas/{name}"}
        jsonschema.Draft202012Validator(schema).validate(value)

    return validate


@pytest.mark.parametrize("name", REQUESTS)
def test_whole_answers(server: RunningServer, check: Callable[[str, Any], None], name: str) -> None:
    path, fields = REQUESTS[name]
    answer = server.post(path, {"temperature": 0, "max_tokens": 4, **fields})
    assert answer.status == 200, answer.body
    content = answer.json()
    if path == CHAT:
        check("CreateChatCompletionResponse", content)
    else:
        check("CreateCompletionResponse", _without_unknown_logprobs(content))
    assert content["usage"]["total_tokens"] == sum(
        content["usage"][key] for key in ("prompt_tokens", "completion_tokens")
    )


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "usage at the end", "usage always"])
@pytest.mark.parametrize("name", REQUESTS)
def test_chunks(
    server: RunningServer, check: Callable[[str, Any], None], name: str, options: dict[str, bool] | None
) -> None:
    path, fields = REQUESTS[name]
    chunks = server.stream(path, {"max_tokens": 4, "stream_options": options, **fields})
    assert chunks
    for chunk in chunks:
        if path == CHAT:
            check("CreateChatCompletionStreamResponse", chunk)
        else:
            check("CreateCompletionResponse", _finished(_without_unknown_logprobs(chunk)))
    for key in ("id", "created", "model", "object"):
        assert len({chunk[key] for chunk in chunks}) == 1
    usages = [chunk.get("usage", "absent") for chunk in chunks]
    if options is None:
        assert set(usages) == {"absent"}
    else:
        always = "continuous_usage_stats" in options
        assert all((usage is not None) == always for usage in usages[:-1])
        assert chunks[-1]["choices"] == []
        assert usages[-1]["completion_tokens"] >= 1 or fields.get("max_tokens") == 0
    endings = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert set(endings) <= {"stop", "length"}
    prompts = fields.get("prompt")
    assert len(endings) == (len(prompts) if isinstance(prompts, list) else 1) * fields.get("n", 1)


def _finished(chunk: dict[str, Any]) -> dict[str, Any]:
    """The chunk as if it were the last: for what comes before that, the legacy schema has no form."""
    choices = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in chunk["choices"]]
    chunk = {**chunk, "choices": choices}
    return {key: value for key, value in chunk.items() if not (key == "usage" and value is None)}


def _without_unknown_logprobs(answer: dict[str, Any]) -> dict[str, Any]:
    """Without the null that an echoed prompt's first token has for a logprob, which the schema does not know."""
    choices: list[dict[str, Any]] = []
    for choice in answer["choices"]:
        if choice["logprobs"] is not None:
            shown = {key: values[1:] if values[:1] == [None] else values for key, values in choice["logprobs"].items()}
            choice = {**choice, "logprobs": shown}
        choices.append(choice)
    return {**answer, "choices": choices}


def test_models(server: RunningServer, check: Callable[[str, Any], None]) -> None:
    models = server.get("/v1/models").json()
    check("ListModelsResponse", models)
    assert [model["id"] for model in models["data"]] == ["demo"]
    check("Model", server.get("/v1/models/demo").json())


ERRORS: dict[str, tuple[int, tuple[str, str, Any]]] = {
    "no JSON object": (400, ("POST", COMPLETIONS, [])),
    "a field": (400, ("POST", CHAT, {"messages": []})),
    "a rule": (400, ("POST", COMPLETIONS, {"prompt": "x", "n": 2, "temperature": 0})),
    "no such model": (404, ("POST", CHAT, {"model": "x", "messages": HISTORY[:1]})),
    "no such route": (404, ("GET", "/v1/nothing", None)),
    "no such method": (405, ("GET", CHAT, None)),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(server: RunningServer, check: Callable[[str, Any], None], name: str) -> None:
    status, (method, path, fields) = ERRORS[name]
    answer = server.post(path, fields) if method == "POST" else server.get(path)
    assert answer.status == status
    check("ErrorResponse", answer.json())
