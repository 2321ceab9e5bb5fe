"""/v1/messages: Anthropic's objects, events, errors and headers, what the template is given, and refusals by name."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from quire.entrypoints.server.dialects.messages_input import chat_fields
from quire.entrypoints.server.messages_request import ConversationRequest

PATH = "/v1/messages"
TEXT = "Once upon a time there was a café."
USER = {"role": "user", "content": "Hi"}
USE = {"type": "tool_use", "id": "t1", "name": "look", "input": {"where": "box"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "A cat."}]}


def post(client: TestClient, path: str = PATH, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json={"messages": [USER], "max_tokens": 100} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    answer = client.post(PATH, json={"messages": [USER], "max_tokens": 100, "stream": True} | body)
    assert answer.status_code == 200, answer.text
    events = []
    for block in answer.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def prompt_of(server: Any) -> str:
    return server.core.tokenizer.decode(server.core.requests[-1].prompt_token_ids, skip_special_tokens=False)


def test_a_message(client: TestClient) -> None:
    answer = post(client, metadata={"user_id": "ann"}, service_tier="auto")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "demo")
    assert answer["content"] == [{"type": "text", "text": TEXT}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    usage = answer["usage"]
    assert usage["cache_read_input_tokens"] == 3
    count = post(client, f"{PATH}/count_tokens")["input_tokens"]
    assert count == usage["input_tokens"] + 3
    assert client.post(f"{PATH}/count_tokens", json={"messages": [USER]}).json() == {"input_tokens": count}


ENDS: dict[str, tuple[dict[str, Any], tuple[str, str | None]]] = {
    "by itself": ({}, ("end_turn", None)),
    "a stop sequence": ({"stop_sequences": ["upon"]}, ("stop_sequence", "upon")),
    "its length": ({"max_tokens": 3}, ("max_tokens", None)),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_stream_is_the_whole_in_pieces(client: TestClient, name: str) -> None:
    body, expected = ENDS[name]
    events = stream(client, **body)
    kinds = list(dict.fromkeys(event["type"] for event in events))
    block = [f"content_block_{part}" for part in ("start", "delta", "stop")]
    assert kinds == ["message_start", "ping", *block, "message_delta", "message_stop"]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert start["usage"]["input_tokens"] > 3
    whole = post(client, **body)
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert whole["content"] == [{"type": "text", "text": text}]
    (end,) = (event for event in events if event["type"] == "message_delta")
    assert end["delta"] == {"stop_reason": expected[0], "stop_sequence": expected[1]}
    assert (whole["stop_reason"], whole["stop_sequence"], whole["usage"]) == (*expected, end["usage"])


def test_the_context_is_full(server: Any, client: TestClient) -> None:
    messages = [{"role": "user", "content": "word " * 100}]
    count = client.post(f"{PATH}/count_tokens", json={"messages": messages}).json()["input_tokens"]
    server.core.texts = ["more " * 40]
    answer = post(client, messages=messages, max_tokens=1000)
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert answer["usage"]["output_tokens"] == 128 - count
    assert post(client, messages=messages, max_tokens=128 - count)["stop_reason"] == "max_tokens"
    long = client.post(PATH, json={"messages": [{"role": "user", "content": "word " * 200}], "max_tokens": 9})
    assert (long.status_code, "maximum context length" in long.json()["error"]["message"]) == (400, True)


def test_what_the_template_is_given(server: Any, client: TestClient) -> None:
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    post(client, system=system)
    assert prompt_of(server) == "<|endoftext|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"
    post(client, messages=[USER, {"role": "assistant", "content": "Well, once"}])
    assert prompt_of(server) == "<|endoftext|><|user|>Hi<|end|><|assistant|>Well, once"


def test_claude_codes_billing_header_does_not_keep_prefixes_from_being_found(server: Any, client: TestClient) -> None:
    header = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch="
    for digest in ("36ee5", "0aaa9"):
        parts = (f"{header}{digest};", "Be brief.")
        post(client, system=[{"type": "text", "text": text} for text in parts])
    first, second = (request.prompt_token_ids for request in server.core.requests)
    assert first == second
    assert prompt_of(server) == "<|endoftext|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"
    post(client, system=[{"type": "text", "text": header}])
    assert "system" not in prompt_of(server)


def test_a_document_of_text_is_text() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "A cat."}
    document = {"type": "document", "source": source, "title": "Pets", "citations": {"enabled": True}}
    result = {**RESULT, "content": [document]}
    turns = [{"role": "user", "content": [document]}, {"role": "assistant", "content": [USE]}]
    body = ConversationRequest(messages=[*turns, {"role": "user", "content": [result]}], max_tokens=5)  # type: ignore
    first, _, last = chat_fields(body)["messages"]
    assert first["content"] == last["content"] == [{"type": "text", "text": "A cat."}]


def test_blocks_make_messages() -> None:
    turns = [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Well"},
                USE,
            ],
        },
        {"role": "user", "content": [RESULT, {"type": "text", "text": "And?"}]},
    ]
    body = ConversationRequest(
        messages=turns,  # type: ignore[arg-type]
        tools=[{"name": "look", "description": "Looks.", "input_schema": {"type": "object"}, "strict": True}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"},
        thinking={"type": "disabled"},
        max_tokens=5,
    )
    fields = chat_fields(body)
    call = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"where": "box"}'}}
    assert fields["messages"] == [
        USER,
        {"role": "assistant", "tool_calls": [call], "content": "Well", "reasoning_content": "Hm"},
        {"role": "tool", "tool_call_id": "t1", "content": [{"type": "text", "text": "A cat."}], "name": "look"},
        {"role": "user", "content": [{"type": "text", "text": "And?"}]},
    ]
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": True}
    assert fields["tools"] == [{"type": "function", "function": function}]
    assert (fields["tool_choice"], fields["parallel_tool_calls"]) == ("required", False)
    assert fields["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert (fields["reasoning_effort"], fields["max_completion_tokens"]) == ("low", 5)
    assert fields["chat_template_kwargs"]["enable_thinking"] is False


def test_what_the_system_says_later_on_belongs_to_the_turn_before() -> None:
    """As Claude Code sends it with every request; Gemma's, Mistral's and Qwen3.5's templates refuse it elsewhere."""

    def conversation(*turns: dict[str, Any], **body: Any) -> list[tuple[str, Any]]:
        messages = chat_fields(ConversationRequest(messages=list(turns), max_tokens=5, **body))["messages"]  # type: ignore
        return [(message["role"], message.get("content")) for message in messages]

    def told(text: str) -> dict[str, Any]:
        return {"role": "system", "content": [{"type": "text", "text": text}]}

    said = ("assistant", "Well")
    assert conversation(told("Short."), USER, system="Rhyme.") == [("system", "Rhyme.\n\nShort."), ("user", "Hi")]
    again = conversation(USER, told("Be brief."), told("Rhyme."), {"role": "assistant", "content": "Well"}, USER)
    assert again == [("user", "Hi\n\nBe brief.\n\nRhyme."), said, ("user", "Hi")]
    turns = [USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}, told("Rhyme.")]
    assert conversation(*turns)[-1] == ("tool", "A cat.\n\nRhyme.")


def test_a_failure_in_mid_stream_is_an_event(server: Any, client: TestClient) -> None:
    server.core.ending = "error"
    *_, last = stream(client)
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert client.post(PATH, json={"messages": [USER], "max_tokens": 9}).json()["type"] == "error"


def test_keys_ids_and_errors(make_server: Callable[..., Any]) -> None:
    with TestClient(make_server(api_key=["a"]).app) as client:
        refused = client.post(PATH, json={"messages": [USER], "max_tokens": 9}, headers={"x-api-key": "b"})
        assert refused.status_code == 401
        body = refused.json()
        assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")
        assert body["request_id"] == refused.headers["request-id"]
        client.headers |= {"x-api-key": "a", "anthropic-version": "2023-06-01"}
        answer = client.post(f"{PATH}?beta=true", json={"messages": [USER], "max_tokens": 9, "model": "demo"})
        assert (answer.status_code, bool(answer.headers["request-id"])) == (200, True)
        missing = client.post(PATH, json={"messages": [USER], "max_tokens": 9, "model": "other"})
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
        large = client.post(PATH, content=b" " * (16 * 2**20 + 1), headers={"content-type": "application/json"})
        assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "no max_tokens": ({"max_tokens": None}, "max_tokens"),
    "no messages": ({"messages": []}, "messages"),
    "a choice's type": ({"tool_choice": {"type": ["auto"]}}, "tool_choice.type"),
    "a role": ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "images"),
    "a text document without data": (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "text"}}]}]},
        "content[0].source.data",
    ),
    "a document": ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "documents"),
    "an unknown block": ({"messages": [{"role": "user", "content": [{"type": "poem"}]}]}, "'poem'"),
    "an image in a result": (
        {
            "messages": [
                {"role": "assistant", "content": [USE]},
                {"role": "user", "content": [{**RESULT, "content": [{"type": "image"}]}]},
            ]
        },
        "messages[1].content[0].content[0]: this model takes no images, only text; send what it shows as a text block",
    ),
    "a result of no call": ({"messages": [{"role": "user", "content": [RESULT]}]}, "'t1'"),
    "an input": ({"messages": [{"role": "assistant", "content": [{**USE, "input": "x"}]}]}, "input"),
    "a system": ({"system": [{"type": "image"}]}, "images"),
    "a tool without a schema": ({"tools": [{"name": "look"}]}, "input_schema"),
    "a tool's type": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
    "a choice": ({"tool_choice": {"type": "both"}}, "tool_choice.type"),
    "thinking": ({"thinking": {"type": "hard"}}, "thinking.type"),
    "no budget": ({"thinking": {"type": "enabled"}}, "budget_tokens"),
    "a budget": ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "budget_tokens"),
    "a format": ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    "a user": ({"metadata": {"user_id": 7}}, "metadata.user_id"),
    "stops": ({"stop_sequences": [""]}, "stop_sequences"),
    "temperature": ({"temperature": 3}, "temperature"),
    "servers": ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    "several answers": ({"n": 2}, "n"),
}


def test_what_agents_ask_of_every_model(client: TestClient) -> None:
    """Claude Code does, and can't be told to leave it out."""
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}
        ],
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        "max_tokens": 32000,
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "user_1_account__session_2"},
        "stream": True,
    }
    answer = client.post(f"{PATH}?beta=true", json=body)
    assert answer.status_code == 200, answer.text
    assert "thinking.budget_tokens" in answer.headers["x-quire-warnings"]


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(shared_client: TestClient, name: str) -> None:
    body, shown = REFUSALS[name]
    given = {"messages": [USER], "max_tokens": 100} | body
    given = {key: value for key, value in given.items() if value is not None}
    for streams in (False, True):
        answer = shared_client.post(PATH, json={**given, "stream": streams})
        assert answer.status_code == 400, answer.text
        error = answer.json()
        assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
        assert shown in error["error"]["message"]
    assert post(shared_client)["content"][0]["text"] == TEXT
