"""semantic-kernel: its OpenAI chat service: texts, streams, a function that is called, a typed answer."""

import asyncio
import json
from typing import Any, Literal

import harness
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory, FunctionCallContent
from semantic_kernel.functions import kernel_function


class Sighting(BaseModel):
    model_config = ConfigDict(extra="forbid")

    place: Literal["box", "bag"]


class Eyes:
    @kernel_function(description="Looks into something.")
    def look(self, place: str) -> str:
        return place


def service() -> OpenAIChatCompletion:
    client: Any = AsyncOpenAI(base_url=f"{harness.URL}/v1", api_key="none")
    return OpenAIChatCompletion(ai_model_id="demo", async_client=client)


def settings(**fields: Any) -> OpenAIChatPromptExecutionSettings:
    return OpenAIChatPromptExecutionSettings(temperature=0.0, max_tokens=100, **fields)


def history() -> ChatHistory:
    given = ChatHistory()
    given.add_user_message("Where is the cat?")
    return given


def texts() -> None:
    async def run() -> tuple[str, str]:
        own = service()
        whole = await own.get_chat_message_content(history(), settings())
        pieces = [str(one) async for one in own.get_streaming_chat_message_content(history(), settings())]
        return str(whole), "".join(pieces)

    whole, streamed = asyncio.run(run())
    assert whole
    assert streamed == whole


def functions() -> None:
    kernel = Kernel()
    kernel.add_plugin(Eyes(), "eyes")
    chosen = FunctionChoiceBehavior.Required(auto_invoke=False)
    answer: Any = asyncio.run(
        service().get_chat_message_content(history(), settings(function_choice_behavior=chosen), kernel=kernel)
    )
    calls = [item for item in answer.items if isinstance(item, FunctionCallContent)]
    assert calls
    assert calls[0].function_name == "look"


def typed_answers() -> None:
    answer = asyncio.run(service().get_chat_message_content(history(), settings(response_format=Sighting)))
    assert json.loads(str(answer))["place"] in ("box", "bag")


harness.run(texts, functions, typed_answers)
