"""/v1/responses through the openai SDK, against a real server: its types hold for every object and event."""

import time
import warnings
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, ConfigDict, TypeAdapter
from serving import RunningServer

INPUT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me a story."}]


class Sighting(BaseModel):
    model_config = ConfigDict(extra="forbid")  # or else the model adds more and more

    place: Literal["box", "bag"]


FIELDS: dict[str, Any] = {"model": "demo", "temperature": 0, "max_output_tokens": 12}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
RESPONSE = TypeAdapter(Response)


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # pydantic's, where an object is not of its type
        yield


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_response(client: openai.OpenAI, server: RunningServer) -> None:
    answer = client.responses.create(input=INPUT, **FIELDS)
    RESPONSE.validate_python(answer.to_dict())
    answer.model_dump_json()
    assert (answer.object, answer.status, answer.model) == ("response", "incomplete", "demo")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    chat = server.chat(INPUT, max_tokens=12)
    assert answer.output_text == chat["choices"][0]["message"]["content"]
    assert answer.usage is not None
    assert answer.usage.output_tokens == chat["usage"]["completion_tokens"]
    with_logprobs = client.responses.create(
        input=INPUT, top_logprobs=2, include=["message.output_text.logprobs"], **FIELDS
    )
    RESPONSE.validate_python(with_logprobs.to_dict())
    assert with_logprobs.output_text == answer.output_text


def test_streams(client: openai.OpenAI) -> None:
    whole = client.responses.create(input=INPUT, **FIELDS)
    events = list(client.responses.create(input=INPUT, stream=True, **FIELDS))
    for event in events:
        EVENTS.validate_python(event.to_dict())
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    stopped: Any = {"extra_body": {"stop": [whole.output_text.split()[2]]}, **FIELDS}  # or else it is not complete
    with client.responses.stream(input=INPUT, **stopped) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert final.output_text
    assert whole.output_text.startswith(final.output_text)


def test_what_is_stored(client: openai.OpenAI, server: RunningServer) -> None:
    first = client.responses.create(input=INPUT, metadata={"a": "b"}, **FIELDS)
    second = client.responses.create(input="And then?", previous_response_id=first.id, **FIELDS)
    turns = [*INPUT, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "And then?"}]
    assert second.output_text == server.chat(turns, max_tokens=12)["choices"][0]["message"]["content"]
    assert client.responses.retrieve(first.id) == first
    items = list(client.responses.input_items.list(second.id, limit=1, order="asc"))
    assert [item.type for item in items] == ["message"] * 4
    client.responses.delete(first.id)
    for gone in (first.id, "resp_0"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)
    with pytest.raises(openai.NotFoundError) as error:
        client.responses.create(input="So?", previous_response_id=first.id, **FIELDS)
    assert error.value.code == "previous_response_not_found"
    assert client.responses.input_tokens.count(model="demo", input="Hi").input_tokens > 2


def test_formats_and_tools(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {**FIELDS, "max_output_tokens": 100}
    parsed = client.responses.parse(input=INPUT, text_format=Sighting, **fields)
    assert parsed.output_parsed is not None
    RESPONSE.validate_python(parsed.to_dict())
    tool: Any = {"type": "function", "name": "look", "parameters": Sighting.model_json_schema(), "strict": True}
    choice: Any = {"tools": [tool], "tool_choice": {"type": "function", "name": "look"}}
    answer = client.responses.create(input=INPUT, **choice, **fields)
    RESPONSE.validate_python(answer.to_dict())
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [Sighting.model_validate_json(call.arguments).place in ("box", "bag") for call in calls] == [True]
    with client.responses.stream(input=INPUT, **choice, **fields) as stream:
        events = list(stream)
        final = stream.get_final_response()
    arguments = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
    assert arguments == [call.arguments for call in calls]
    assert [item.type for item in final.output] == [item.type for item in answer.output]
    output: Any = [{"type": "function_call_output", "call_id": calls[0].call_id, "output": "A cat."}]
    assert client.responses.create(input=output, previous_response_id=answer.id, **FIELDS).output_text


def test_the_background(client: openai.OpenAI, server: RunningServer) -> None:
    queued = client.responses.create(input=INPUT, background=True, **FIELDS)
    assert queued.status == "queued"
    while (done := client.responses.retrieve(queued.id)).status in ("queued", "in_progress"):
        time.sleep(0.02)
    assert done.output_text == client.responses.create(input=INPUT, **FIELDS).output_text
    events = list(client.responses.create(input=INPUT, background=True, stream=True, **FIELDS))
    again = client.responses.retrieve(events[0].response.id, stream=True, starting_after=2)  # type: ignore[union-attr]
    assert [event.to_dict() for event in again] == [event.to_dict() for event in events[3:]]
    long = {**FIELDS, "max_output_tokens": 400, "extra_body": {"ignore_eos": True}}

    def cancelled() -> bool:
        running = client.responses.create(input=INPUT, background=True, **long)
        return client.responses.cancel(running.id).status == "cancelled"

    # 400 tokens take a tenth of a second: on a busy machine all may be there before anybody can cancel.
    assert any(cancelled() for _ in range(20))
    server.wait_idle()


def test_refusals_by_name(client: openai.OpenAI, server: RunningServer) -> None:
    before = server.golden()
    refused: dict[str, dict[str, Any]] = {
        "input[0]": {"input": [{"type": "computer_call"}]},
        "input[0].content": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "background": {"background": True, "store": False},
        "tools[0]": {"tools": [{"type": "web_search"}]},
        "temperature": {"temperature": 3},
        "conversation": {"conversation": "conv_1"},
        "text.format": {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "thing"}}}},
    }
    for param, fields in refused.items():
        with pytest.raises(openai.BadRequestError) as error:
            client.responses.create(**{"input": "Hi", **FIELDS, **fields})
        assert error.value.param == param
    assert server.golden() == before
