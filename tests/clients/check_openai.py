"""The openai SDK: plain, streamed and asynchronous requests, responses, tools, schemas, leaving, retries, errors.

Runs with the newest version and with an old one; what the newest reads in detail is in tests/server/test_openai_sdk.py.
"""

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import harness
import openai
from pydantic import BaseModel

MESSAGES: Any = [{"role": "user", "content": "Tell me a story."}]
FIELDS: Any = {"model": "demo", "max_tokens": 12, "temperature": 0}
LONG: Any = {"model": "demo", "max_tokens": 480, "n": 128, "temperature": 1, "extra_body": {"ignore_eos": True}}
client = openai.OpenAI(base_url=f"{harness.URL}/v1", api_key="none", max_retries=0)
narrow = openai.OpenAI(base_url=f"{harness.NARROW_URL}/v1", api_key=harness.KEY, max_retries=10)


def text_of(prompt: str) -> str:
    return client.completions.create(prompt=prompt, **FIELDS).choices[0].text


def answers() -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert text_of("The old house")
    chat = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=1, **FIELDS)
    assert chat.usage.completion_tokens == len(chat.choices[0].logprobs.content) <= 12
    parts = [{"role": "user", "content": [{"type": "text", "text": "Tell me a story."}]}]
    assert client.chat.completions.create(messages=parts, **FIELDS).choices[0].message == chat.choices[0].message


def streams() -> None:
    whole = client.chat.completions.create(messages=MESSAGES, **FIELDS)
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(messages=MESSAGES, **FIELDS, **options)
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole.choices[0].message.content
    assert last.usage == whole.usage
    pieces = client.completions.create(prompt="The old house", stream=True, **FIELDS)
    assert "".join(piece.choices[0].text for piece in pieces) == text_of("The old house")


def asynchronous() -> None:
    prompts = [f"The old house number {number}" for number in range(16)]

    async def ask(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(prompt=prompt, stream=True, **FIELDS)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{harness.URL}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in prompts))

    assert asyncio.run(ask_all()) == [text_of(prompt) for prompt in prompts]


def leaving() -> None:
    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=f"{harness.URL}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(messages=MESSAGES, stream=True, **LONG)
            async for _ in stream:
                break
            await stream.close()

    def leave_by_timeout() -> None:
        impatient = client.with_options(timeout=0.1)
        harness.raised(openai.APITimeoutError, lambda: impatient.completions.create(prompt="x", **LONG))

    def leave_stream() -> None:
        with client.chat.completions.create(messages=MESSAGES, stream=True, **LONG) as stream:
            next(stream)

    for way in (leave_stream, leave_by_timeout, lambda: asyncio.run(leave())):
        before = harness.metric("vllm:generation_tokens_total")
        way()
        harness.wait_idle()
        assert harness.metric("vllm:generation_tokens_total") - before < LONG["n"] * LONG["max_tokens"]


def retries() -> None:
    def ask(client: openai.OpenAI) -> int:
        answer = client.completions.create(model="demo", prompt="x", max_tokens=400, extra_body={"ignore_eos": True})
        return answer.usage.completion_tokens

    def ask_once(_: int) -> Exception | None:
        try:
            ask(narrow.with_options(max_retries=0))
        except openai.OpenAIError as error:
            return error
        return None

    with ThreadPoolExecutor(6) as pool:
        refusals = [error for error in pool.map(ask_once, range(6)) if error is not None]
        assert refusals, "six at once, and room for two"
        assert all(isinstance(error, openai.InternalServerError) for error in refusals), refusals
        assert {error.status_code for error in refusals} == {503}
        assert all(int(error.response.headers["retry-after"]) >= 1 for error in refusals)
        assert list(pool.map(ask, [narrow] * 6)) == [400] * 6


class Sighting(BaseModel):
    place: Literal["box", "bag"]


LOOK: Any = {"name": "look", "parameters": openai.pydantic_function_tool(Sighting)["function"]["parameters"]}
PLACES = ("box", "bag")


def responses() -> None:
    fields: Any = {"model": "demo", "temperature": 0, "max_output_tokens": 12}
    whole = client.responses.create(input=MESSAGES, **fields)
    assert (whole.status, bool(whole.output_text)) == ("incomplete", True)
    stopped: Any = {**fields, "extra_body": {"stop": [whole.output_text.split()[2]]}}
    with client.responses.stream(input=MESSAGES, **stopped) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text
    following = client.responses.create(input="And then?", previous_response_id=whole.id, **fields)
    assert client.responses.retrieve(following.id).output_text == following.output_text
    background = client.responses.create(input=MESSAGES, background=True, **fields)
    while (done := client.responses.retrieve(background.id)).status in ("queued", "in_progress"):
        time.sleep(0.05)
    assert done.output_text == whole.output_text


def formats() -> None:
    fields: Any = {"model": "demo", "temperature": 0}
    parsed = client.chat.completions.parse(messages=MESSAGES, response_format=Sighting, max_tokens=60, **fields)
    assert parsed.choices[0].message.parsed.place in PLACES
    response = client.responses.parse(input=MESSAGES, text_format=Sighting, max_output_tokens=60, **fields)
    assert response.output_parsed.place in PLACES
    free: Any = {"type": "json_object"}
    answer = client.chat.completions.create(messages=MESSAGES, response_format=free, stop="}", max_tokens=200, **fields)
    assert answer.choices[0].message.content.startswith("{")


def tools() -> None:
    tool: Any = {"type": "function", "function": LOOK}
    fields: Any = {"model": "demo", "temperature": 0, "max_tokens": 100, "tools": [tool], "tool_choice": "required"}
    message = client.chat.completions.create(messages=MESSAGES, **fields).choices[0].message
    calls = message.tool_calls
    assert all(json.loads(call.function.arguments)["place"] in PLACES for call in calls)
    deltas = [c.choices[0].delta for c in client.chat.completions.create(messages=MESSAGES, stream=True, **fields)]
    pieces = [piece for delta in deltas for piece in delta.tool_calls or ()]
    arguments = ["".join(p.function.arguments or "" for p in pieces if p.index == n) for n in range(len(calls))]
    assert arguments == [call.function.arguments for call in calls]
    results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "A cat."} for call in calls]
    history: Any = [*MESSAGES, message, *results]
    assert client.chat.completions.create(messages=history, **{**fields, "tool_choice": "none"}).choices

    named: Any = {"tools": [{"type": "function", **LOOK}], "tool_choice": {"type": "function", "name": "look"}}
    answer = client.responses.create(model="demo", input=MESSAGES, temperature=0, max_output_tokens=100, **named)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert json.loads(call.arguments)["place"] in PLACES
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "A cat."}]
    after: Any = {"previous_response_id": answer.id, "max_output_tokens": 12}
    assert client.responses.create(model="demo", input=output, **after).output_text


def errors() -> None:
    def chat(client: openai.OpenAI = client, **fields: Any) -> Any:
        return lambda: client.chat.completions.create(**{"model": "demo", "messages": MESSAGES, **fields})

    bad = harness.raised(openai.BadRequestError, chat(temperature=3))
    assert (bad.type, bad.param) == ("invalid_request_error", "temperature")
    long = harness.raised(openai.BadRequestError, chat(messages=[{"role": "user", "content": "word " * 1000}]))
    assert long.code == "context_length_exceeded"
    missing = harness.raised(openai.NotFoundError, chat(model="other"))
    assert missing.code == "model_not_found"
    locked = harness.raised(openai.AuthenticationError, chat(narrow.with_options(api_key="wrong")))
    assert (locked.type, locked.code) == ("authentication_error", "invalid_api_key")


if __name__ == "__main__":
    harness.run(answers, streams, responses, formats, tools, asynchronous, leaving, retries, errors)
