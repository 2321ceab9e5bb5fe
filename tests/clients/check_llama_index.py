"""llama-index (openai-like): completions and chats, plain, streamed and asynchronous; a tool; a typed answer."""

import asyncio
from typing import Any, Literal

import harness
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict

SAME: Any = {"model": "demo", "api_base": f"{harness.URL}/v1", "api_key": "none", "context_window": 512}
SAME |= {"max_tokens": 60, "temperature": 0.0}
chat = OpenAILike(**SAME, is_chat_model=True, is_function_calling_model=True)
plain = OpenAILike(**SAME, is_chat_model=False)
USER = [ChatMessage(role="user", content="Tell me a story.")]


class Sighting(BaseModel):
    """Where it is."""

    model_config = ConfigDict(extra="forbid")

    place: Literal["box", "bag"]


def texts() -> None:
    whole = chat.chat(USER).message.content
    assert whole
    assert "".join(piece.delta or "" for piece in chat.stream_chat(USER)) == whole
    assert asyncio.run(chat.achat(USER)).message.content == whole
    text = plain.complete("Once upon").text
    assert text
    assert "".join(piece.delta or "" for piece in plain.stream_complete("Once upon")) == text


def tools() -> None:
    def look(place: Literal["box", "bag"]) -> str:
        """Looks into something."""
        return f"The {place} has a cat."

    tool = FunctionTool.from_defaults(look)
    response = chat.chat_with_tools([tool], user_msg="Where is it?", tool_required=True)
    (call,) = chat.get_tool_calls_from_response(response)
    assert call.tool_name == "look"
    assert call.tool_kwargs["place"] in ("box", "bag")


def typed_answers() -> None:
    answer: Any = chat.as_structured_llm(Sighting).chat(USER).raw
    assert answer.place in ("box", "bag")


harness.run(texts, tools, typed_answers)
