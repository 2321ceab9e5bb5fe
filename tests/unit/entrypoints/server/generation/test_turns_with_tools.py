"""/v1/responses and /v1/messages where the model thinks and calls tools: items, blocks and events."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import TypeAdapter

SCHEMA = {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]}
THOUGHT, SAID = "Let me see.", "I look."
ARGUMENTS = {"where": "a {}"}
CALLS = "".join(
    f"<tool_call>\n{json.dumps({'name': 'look', 'arguments': ARGUMENTS})}\n</tool_call>\n" for _ in range(2)
)
ANSWER = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}\n{CALLS}"
RESPONSES: dict[str, Any] = {
    "input": "Hi",
    "tools": [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}],
}
MESSAGES: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 1000,
    "tools": [{"name": "look", "input_schema": SCHEMA}],
}


THOUGHTS = ("reasoning", "reasoning_content")


@pytest.fixture
def server(make_server: Callable[..., Any]) -> Any:
    server = make_server(tool_call_parser="hermes", reasoning_parser="qwen3")
    server.core.texts = [ANSWER]
    return server


@pytest.fixture
def client(server: Any) -> Iterator[TestClient]:
    with TestClient(server.app) as client:
        yield client


def post(client: TestClient, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(client: TestClient, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = client.post(path, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    return [json.loads(block.split("\ndata: ")[1]) for block in answer.text.split("\n\n")[:-1]]


def schema_of(event: dict[str, Any]) -> str:
    words = event["type"].replace("output_text", "text").replace(".", "_").split("_")
    return "".join(word.capitalize() for word in words) + "Event"


def without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [without_ids(entry) for entry in value]
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id", "signature")}
    return value


def test_a_call_that_is_cut_is_incomplete(client: TestClient, server: Any) -> None:
    """Agents would run it, or stumble over its arguments."""
    server.core.texts = [CALLS]
    found = set[tuple[str, bool]]()
    for limit in range(10, 60, 2):
        *_, last = stream(client, "/v1/responses", **RESPONSES, max_output_tokens=limit)
        for item in last["response"]["output"]:
            found.add((item["status"], item["arguments"] == json.dumps(ARGUMENTS)))
    assert found == {("completed", True), ("incomplete", False)}


def test_a_response(client: TestClient, openai_errors: Callable[..., list[str]]) -> None:
    answer = post(client, "/v1/responses", **RESPONSES)
    assert openai_errors("Response", answer) == []
    assert answer["status"] == "completed"
    thought, said, *calls = answer["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": thought["content"][0]["text"]}]
    assert (thought["content"][0]["text"].strip(), said["content"][0]["text"].strip()) == (THOUGHT, SAID)
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [("look", ARGUMENTS)] * 2
    assert len({call["call_id"] for call in calls}) == 2
    usage = answer["usage"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]

    events = stream(client, "/v1/responses", **RESPONSES)
    for event in events:
        assert openai_errors(schema_of(event), event) == []
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert without_ids(events[-1]["response"]["output"]) == without_ids(answer["output"])
    for place, item in enumerate(events[-1]["response"]["output"]):
        own = [event for event in events if event.get("output_index") == place]
        assert (own[0]["type"], own[-1]["type"]) == ("response.output_item.added", "response.output_item.done")
        assert own[-1]["item"] == item
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(event["delta"] for event in own if event["type"].endswith(".delta")) == text
    kinds = [event["type"] for event in events]
    assert kinds.count("response.function_call_arguments.done") == 2
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")


def test_a_response_with_logprobs_has_those_of_its_text(client: TestClient) -> None:
    answer = post(client, "/v1/responses", **RESPONSES, include=["message.output_text.logprobs"])
    tokens = answer["output"][1]["content"][0]["logprobs"]
    shown = "".join(token["token"] for token in tokens)
    assert "look" in shown
    assert "see" not in shown
    assert "box" not in shown


@pytest.mark.parametrize("between", ["", " {}."])
def test_text_around_calls_has_the_logprobs_of_its_own_tokens_however_they_come(
    server: Any, client: TestClient, between: str
) -> None:
    """Also where a call, and the text on both its sides, are one piece."""
    call = '<tool_call>\n{"name": "look", "arguments": {"a": {}}}\n</tool_call>'
    server.core.texts = [f"I look, where 🙂?{call}{between}{call}I look."]
    found = set()
    for server.core.stride in range(1, 90):
        answer = post(client, "/v1/responses", **RESPONSES, include=["message.output_text.logprobs"])
        texts = [item["content"][0] for item in answer["output"] if item["type"] == "message"]
        tokens = tuple(token["token"] for text in texts for token in text["logprobs"])
        found.add((tuple(text["text"] for text in texts), tokens))
    ((texts, tokens),) = found
    assert (texts[0], texts[-1], len(texts)) == ("I look, where 🙂?", "I look.", 3 if between else 2)
    assert (tokens[0], tokens[-1]) == ("I", "<|endoftext|>")
    assert not {"<", "{", "name"} & set(tokens) or between


def test_tools_go_on_in_the_next_response(server: Any, client: TestClient) -> None:
    first = post(client, "/v1/responses", **RESPONSES)
    calls = [item for item in first["output"] if item["type"] == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": call["call_id"], "output": "A cat."} for call in calls]
    server.core.texts = ["A cat."]
    body: dict[str, Any] = {**RESPONSES, "input": outputs, "previous_response_id": first["id"]}
    second = post(client, "/v1/responses", **body)
    assert second["output"][0]["content"][0]["text"] == "A cat."
    server.core.texts = ["A dog."]
    whole = [{"role": "user", "content": "Hi"}, *first["output"], *outputs]  # as without a store
    prompts = [request.prompt_token_ids for request in server.core.requests]
    post(client, "/v1/responses", **{**RESPONSES, "input": whole, "store": False})
    assert server.core.requests[-1].prompt_token_ids == prompts[-1]


def test_a_message(client: TestClient) -> None:
    answer = post(client, "/v1/messages", **MESSAGES)
    assert answer["stop_reason"] == "tool_use"
    thought, said, *uses = answer["content"]
    assert (thought["type"], thought["thinking"].strip(), bool(thought["signature"])) == ("thinking", THOUGHT, True)
    assert (said["type"], said["text"].strip()) == ("text", SAID)
    assert [(use["name"], use["input"]) for use in uses] == [("look", ARGUMENTS)] * 2

    events = stream(client, "/v1/messages", **MESSAGES)
    for place, block in enumerate(answer["content"]):
        start, *deltas, stop = [event for event in events if event.get("index") == place]
        assert (start["type"], stop["type"]) == ("content_block_start", "content_block_stop")
        assert start["content_block"]["type"] == block["type"]
        kind = {"thinking": "thinking", "text": "text", "tool_use": "partial_json"}[block["type"]]
        text = "".join(delta["delta"].get(kind, "") for delta in deltas)
        assert (json.loads(text) if kind == "partial_json" else text) == block.get(kind, block.get("input"))
        assert (deltas[-1]["delta"]["type"] == "signature_delta") == (block["type"] == "thinking")
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"] == answer["usage"]


@pytest.mark.slow  # the SDK's types take seconds to import
def test_messages_and_their_events_are_of_the_sdks_types(client: TestClient) -> None:
    types = pytest.importorskip("anthropic.types")
    TypeAdapter(types.Message).validate_python(post(client, "/v1/messages", **MESSAGES), strict=True)
    adapter: TypeAdapter[Any] = TypeAdapter(types.RawMessageStreamEvent)
    for event in stream(client, "/v1/messages", **MESSAGES):
        if event != {"type": "ping"}:  # which the SDK keeps to itself
            adapter.validate_python(event, strict=True)


def test_results_go_on_in_the_next_message(server: Any, client: TestClient) -> None:
    first = post(client, "/v1/messages", **MESSAGES)
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "A cat."}
        for block in first["content"]
        if block["type"] == "tool_use"
    ]
    server.core.texts = ["A cat."]
    turns = [
        *MESSAGES["messages"],
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": results},
    ]
    second = post(client, "/v1/messages", **{**MESSAGES, "messages": turns})
    assert (second["stop_reason"], second["content"][0]["text"]) == ("end_turn", "A cat.")


def test_choices(server: Any, client: TestClient) -> None:
    server.core.texts = [CALLS.split("\n</tool_call>")[0] + "\n</tool_call>"]
    for choice in ("required", {"type": "function", "name": "look"}):
        post(client, "/v1/responses", **RESPONSES, tool_choice=choice)
        assert server.core.requests[-1].task.params.structured_outputs is not None
    for choice in ({"type": "any"}, {"type": "tool", "name": "look"}):
        answer = post(client, "/v1/messages", **MESSAGES, tool_choice=choice)
        assert server.core.requests[-1].task.params.structured_outputs is not None
        assert answer["stop_reason"] == "tool_use"
    post(client, "/v1/messages", **MESSAGES, tool_choice={"type": "none"})
    assert server.core.requests[-1].task.params.structured_outputs is None


def test_a_stop_sequence_within_a_call(client: TestClient) -> None:
    """It is told where it cut the call, whose input is none then; after a whole call, that there is one."""
    ends = {"a {": ("stop_sequence", "a {", {}), "\n</tool_call>": ("tool_use", None, ARGUMENTS)}
    for word, (reason, sequence, arguments) in ends.items():
        body = {**MESSAGES, "stop_sequences": [word]}
        answer = post(client, "/v1/messages", **body)
        assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
        assert [block["input"] for block in answer["content"] if block["type"] == "tool_use"] == [arguments]
        end = stream(client, "/v1/messages", **body)[-2]["delta"]
        assert (end["stop_reason"], end["stop_sequence"]) == (reason, sequence)


REFUSALS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a choice of no tool": ("/v1/responses", {"tool_choice": {"type": "function", "name": "leap"}}, "leap"),
    "two of one name": ("/v1/responses", {"tools": RESPONSES["tools"] * 2}, "look"),
    "a schema": ("/v1/responses", {"tools": [{"type": "function", "name": "look", "parameters": 7}]}, "tools"),
    "a use of no tool": ("/v1/messages", {"tool_choice": {"type": "tool", "name": "leap"}}, "leap"),
    "two tools of one name": ("/v1/messages", {"tools": MESSAGES["tools"] * 2}, "look"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(client: TestClient, name: str) -> None:
    path, body, shown = REFUSALS[name]
    given = RESPONSES if path == "/v1/responses" else MESSAGES
    refused = client.post(path, json={**given, **body})
    assert refused.status_code == 400, refused.text
    assert shown in refused.json()["error"]["message"]
    assert "function." not in refused.json()["error"]["message"]
    assert post(client, path, **given)


def test_thinking_and_effort_are_asked_for_by_name(client: TestClient, make_server: Callable[..., Any]) -> None:
    for kind in ("adaptive", "disabled"):
        assert post(client, "/v1/messages", **MESSAGES, thinking={"type": kind})["content"]
    with TestClient(make_server().app) as plain:
        thinking = {"type": "enabled", "budget_tokens": 20}
        for own in (plain, client):  # without thoughts that are told apart, and without a token that ends one
            unbound = own.post("/v1/messages", json={**MESSAGES, "tools": None, "thinking": thinking})
            assert unbound.status_code == 200
            assert "'thinking.budget_tokens'" in unbound.headers["x-quire-warnings"]
        ignored = plain.post("/v1/responses", json={"input": "Hi", "reasoning": {"effort": "high"}})
        assert (ignored.status_code, "'reasoning.effort'" in ignored.headers["x-quire-warnings"]) == (200, True)


def test_thoughts_that_are_not_to_be_told(client: TestClient) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES["messages"]}
    told, kept = (post(client, "/v1/chat/completions", **asked, include_reasoning=b) for b in (True, False))
    assert told["choices"][0]["message"]["reasoning"]
    assert kept["choices"][0]["message"] == told["choices"][0]["message"] | dict.fromkeys(THOUGHTS)
    assert kept["usage"] == told["usage"]
    answer = client.post("/v1/chat/completions", json=asked | {"include_reasoning": False, "stream": True})
    assert "x-quire-warnings" not in answer.headers
    chunks = [json.loads(block.removeprefix("data: ")) for block in answer.text.split("\n\n")[:-2]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert not any(delta.get(name) for delta in deltas for name in THOUGHTS)
    assert "".join(delta.get("content") or "" for delta in deltas) == kept["choices"][0]["message"]["content"]
    told, kept = (post(client, "/v1/responses", input="Hi", include_reasoning=b) for b in (True, False))
    assert [item["type"] for item in told["output"]] == ["reasoning", *(item["type"] for item in kept["output"])]
    assert kept["usage"] == told["usage"]
