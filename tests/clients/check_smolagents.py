"""smolagents: its OpenAI model: texts, streams, a tool that is called, a schema."""

import json
from typing import Any

import harness
from smolagents import OpenAIServerModel, tool
from smolagents.models import ChatMessage, MessageRole

model = OpenAIServerModel(model_id="demo", api_base=f"{harness.URL}/v1", api_key="none", temperature=0.0, max_tokens=60)
USER = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": "Where is the cat?"}])]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"enum": ["box", "bag"]}},
    "required": ["place"],
    "additionalProperties": False,
}


@tool
def look(place: str) -> str:
    """Looks into something.

    Args:
        place: where to look
    """
    return place


def texts() -> None:
    whole = model.generate(USER).content
    assert whole
    assert "".join(piece.content or "" for piece in model.generate_stream(USER)) == whole


def tools() -> None:
    (call,) = model.generate(USER, tools_to_call_from=[look], max_tokens=200).tool_calls or ()
    assert call.function.name == "look"


def schemas() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "sighting", "strict": True, "schema": SCHEMA}}
    answer: Any = model.generate(USER, response_format=form).content
    assert json.loads(answer)["place"] in ("box", "bag")


harness.run(texts, tools, schemas)
