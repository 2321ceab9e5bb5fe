"""/v1/messages through the anthropic SDK, against a real server: its types hold for every object and event."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter
from serving import RunningServer

pytestmark = pytest.mark.slow  # for that import

USER: Any = [{"role": "user", "content": "Tell me a story."}]
# Beside its own fields the SDK sends what else a request may have.
FIELDS: dict[str, Any] = {"model": "demo", "max_tokens": 12, "extra_body": {"temperature": 0, "top_k": 5, "top_p": 0.9}}


@pytest.fixture(scope="module")
def anthropic() -> Any:
    """The SDK, whose import takes longer than all that is collected of this file."""
    return pytest.importorskip("anthropic")


@pytest.fixture(scope="module")
def client(anthropic: Any, server: RunningServer) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message(anthropic: Any, client: Any, server: RunningServer) -> None:
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    message = client.messages.create(messages=USER, system=system, **FIELDS)
    TypeAdapter(anthropic.types.Message).validate_python(message.to_dict(), strict=True)
    assert (message.type, message.role, message.model) == ("message", "assistant", "demo")
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 12)
    chat = server.chat([{"role": "system", "content": "Be brief."}, *USER], max_tokens=12)
    assert text_of(message) == chat["choices"][0]["message"]["content"]
    count = client.messages.count_tokens(model="demo", messages=USER, system="Be brief.").input_tokens
    assert count == chat["usage"]["prompt_tokens"]
    usage = client.messages.create(messages=USER, system=system, **FIELDS).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == count
    assert message._request_id


def test_streams(anthropic: Any, client: Any) -> None:
    whole = client.messages.create(messages=USER, **FIELDS)
    adapter: TypeAdapter[Any] = TypeAdapter(anthropic.types.RawMessageStreamEvent)
    raw = list(client.messages.create(messages=USER, stream=True, **FIELDS))
    for event in raw:
        adapter.validate_python(event.to_dict(), strict=True)
    assert [raw[0].type, raw[1].type, raw[-1].type] == ["message_start", "content_block_start", "message_stop"]
    with client.messages.stream(messages=USER, **FIELDS) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(final) == text_of(whole)
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    word = text_of(whole).split()[1]
    stopped = client.messages.create(messages=USER, stop_sequences=[word], **FIELDS)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)


def test_tools_and_formats(anthropic: Any, client: Any) -> None:
    schema = {"type": "object", "properties": {"place": {"enum": ["box", "bag"]}}, "required": ["place"]}
    schema["additionalProperties"] = False
    fields = {**FIELDS, "max_tokens": 100, "tools": [{"name": "look", "input_schema": schema}]}
    message = client.messages.create(messages=USER, tool_choice={"type": "tool", "name": "look"}, **fields)
    TypeAdapter(anthropic.types.Message).validate_python(message.to_dict(), strict=True)
    (use,) = [block for block in message.content if block.type == "tool_use"]
    assert (message.stop_reason, use.input["place"] in ("box", "bag")) == ("tool_use", True)
    with client.messages.stream(messages=USER, tool_choice={"type": "tool", "name": "look"}, **fields) as stream:
        (streamed,) = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert streamed.input == use.input
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "A cat."}]}
    turns = [*USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(messages=turns, tool_choice={"type": "none"}, **fields).content
    config = {"format": {"type": "json_schema", "schema": schema}}
    answer = client.messages.create(messages=USER, output_config=config, **{**FIELDS, "max_tokens": 60})
    assert json.loads(text_of(answer))["place"] in ("box", "bag")


def test_leaving_ends_the_request(client: Any, server: RunningServer) -> None:
    fields = {**FIELDS, "max_tokens": 400, "extra_body": {"ignore_eos": True}}

    def generated() -> float:
        before = server.metrics()["vllm:generation_tokens_total"]
        with client.messages.stream(messages=USER, **fields) as stream:
            next(iter(stream))
        server.wait_idle()
        return server.metrics()["vllm:generation_tokens_total"] - before

    # 400 tokens take a tenth of a second: on a busy machine all may be there before anybody can leave.
    assert any(generated() < 400 for _ in range(20))


def test_refusals(anthropic: Any, client: Any, server: RunningServer) -> None:
    before = server.golden()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    refused: list[tuple[str, dict[str, Any]]] = [
        ("images", {"messages": [{"role": "user", "content": [image]}]}),
        ("tools", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("maximum context length", {"messages": [{"role": "user", "content": "word " * 1000}]}),
        ("budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": 12}}),
        ("max_tokens", {"max_tokens": 0}),
    ]
    for shown, fields in refused:
        with pytest.raises(anthropic.BadRequestError, match=shown) as error:
            client.messages.create(**{"messages": USER, **FIELDS, **fields})
        assert error.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(messages=USER, **{**FIELDS, "model": "claude-other"})
    without = server.post("/v1/messages", {"messages": USER})
    assert (without.status, "max_tokens" in without.json()["error"]["message"]) == (400, True)
    assert server.golden() == before


@pytest.mark.slow
def test_keys(anthropic: Any, server_of: Callable[..., RunningServer]) -> None:
    server = server_of("--api-key", "sk-test", "--max-num-seqs", "1", "--max-num-queued-reqs", "1",
                       "--enable-request-id-headers")  # fmt: skip
    with anthropic.Anthropic(base_url=server.url, api_key="sk-test", max_retries=0) as client:
        assert text_of(client.messages.create(messages=USER, **FIELDS))
    with anthropic.Anthropic(base_url=server.url, auth_token="sk-test", max_retries=0) as client:
        assert text_of(client.messages.create(messages=USER, **FIELDS))
    with anthropic.Anthropic(base_url=server.url, api_key="other", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as error:
            client.messages.create(messages=USER, **FIELDS)
        assert error.value.body["error"]["type"] == "authentication_error"
