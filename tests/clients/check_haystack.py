"""haystack: its generators for text and chat, plain and streamed; tools; a schema; a vector."""

import json
from typing import Any

import harness
from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"enum": ["box", "bag"]}},
    "required": ["place"],
    "additionalProperties": False,
}
USER = [ChatMessage.from_user("Where is the cat?")]


def generator(**fields: Any) -> OpenAIChatGenerator:
    settings = {"max_tokens": 60, "temperature": 0.0} | fields.pop("settings", {})
    key = Secret.from_token("none")
    return OpenAIChatGenerator(
        model="demo", api_base_url=f"{harness.URL}/v1", api_key=key, generation_kwargs=settings, **fields
    )


def texts() -> None:
    (whole,) = generator().run(USER)["replies"]
    assert whole.text
    pieces: list[str] = []
    (streamed,) = generator(streaming_callback=lambda chunk: pieces.append(chunk.content)).run(USER)["replies"]
    assert streamed.text == whole.text == "".join(pieces)


def tools() -> None:
    tool = Tool(name="look", description="Looks.", parameters=SCHEMA, function=lambda place: place)
    (reply,) = generator(tools=[tool], settings={"tool_choice": "required"}).run(USER)["replies"]
    (call,) = reply.tool_calls
    assert call.tool_name == "look"
    assert call.arguments["place"] in ("box", "bag")


def schemas() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "sighting", "strict": True, "schema": SCHEMA}}
    (reply,) = generator(settings={"response_format": form}).run(USER)["replies"]
    assert json.loads(reply.text or "")["place"] in ("box", "bag")


def vectors() -> None:
    embedder = OpenAITextEmbedder(model="demo", api_base_url=f"{harness.URL}/v1", api_key=Secret.from_token("none"))
    found = embedder.run("Where is the cat?")
    assert len(found["embedding"]) == 256
    assert found["meta"]["usage"]["total_tokens"] > 3


harness.run(texts, tools, schemas, vectors)
