"""The anthropic SDK: messages, streams, tools and their results, counting, schemas, errors; async too."""

import asyncio
import json
from typing import Any

import anthropic
import harness

client = anthropic.Anthropic(base_url=harness.URL, api_key="none", max_retries=0)
USER: Any = [{"role": "user", "content": "Tell me a story."}]
FIELDS: Any = {"model": "demo", "max_tokens": 12, "extra_body": {"temperature": 0}}
SCHEMA: Any = {
    "type": "object",
    "properties": {"place": {"enum": ["box", "bag"]}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOLS: Any = [{"name": "look", "description": "Looks into something.", "input_schema": SCHEMA}]


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def answers() -> None:
    message = client.messages.create(messages=USER, system="Be brief.", **FIELDS)
    assert (message.stop_reason, message.usage.output_tokens, bool(text_of(message))) == ("max_tokens", 12, True)
    assert client.messages.count_tokens(model="demo", messages=USER).input_tokens > 5
    word = text_of(message).split()[1]
    stopped = client.messages.create(messages=USER, system="Be brief.", stop_sequences=[word], **FIELDS)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)


def streams() -> None:
    whole = client.messages.create(messages=USER, **FIELDS)
    with client.messages.stream(messages=USER, **FIELDS) as stream:
        assert "".join(stream.text_stream) == text_of(whole)
        assert stream.get_final_message().usage == whole.usage


def asynchronous() -> None:
    async def ask() -> str:
        own = anthropic.AsyncAnthropic(base_url=harness.URL, api_key="none")
        async with own, own.messages.stream(messages=USER, **FIELDS) as stream:
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(ask()) == text_of(client.messages.create(messages=USER, **FIELDS))


def tools() -> None:
    fields = {**FIELDS, "max_tokens": 100, "tools": TOOLS, "tool_choice": {"type": "tool", "name": "look"}}
    message = client.messages.create(messages=USER, **fields)
    (use,) = [block for block in message.content if block.type == "tool_use"]
    assert (message.stop_reason, use.name, use.input["place"] in ("box", "bag")) == ("tool_use", "look", True)
    with client.messages.stream(messages=USER, **fields) as stream:
        streamed = stream.get_final_message()
    assert [block.input for block in streamed.content if block.type == "tool_use"] == [use.input]
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "A cat."}
    turns: Any = [*USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(messages=turns, tools=TOOLS, tool_choice={"type": "none"}, **FIELDS).content


def schemas() -> None:
    config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = client.messages.create(messages=USER, output_config=config, **{**FIELDS, "max_tokens": 60})
    assert json.loads(text_of(message))["place"] in ("box", "bag")


def errors() -> None:
    def ask(own: anthropic.Anthropic = client, **fields: Any) -> Any:
        return lambda: own.messages.create(**{"messages": USER, **FIELDS, **fields})

    image: Any = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]
    assert "images" in str(harness.raised(anthropic.BadRequestError, ask(messages=image)))
    harness.raised(anthropic.BadRequestError, ask(messages=[{"role": "user", "content": "word " * 1000}]))
    harness.raised(anthropic.NotFoundError, ask(model="claude-other"))
    narrow = anthropic.Anthropic(base_url=harness.NARROW_URL, api_key="wrong", max_retries=0)
    harness.raised(anthropic.AuthenticationError, ask(narrow))
    assert narrow.with_options(api_key=harness.KEY).messages.create(messages=USER, **FIELDS).content


if __name__ == "__main__":
    harness.run(answers, streams, asynchronous, tools, schemas, errors)
