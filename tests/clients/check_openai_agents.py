"""openai-agents: over chat completions and responses: text, streams, a tool that is called, typed output."""

import asyncio
from typing import Any, Literal

import harness
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict

set_tracing_disabled(True)


def models() -> dict[str, Any]:
    """Made anew for each event loop."""
    client = AsyncOpenAI(base_url=f"{harness.URL}/v1", api_key="none")
    return {"chat": OpenAIChatCompletionsModel("demo", client), "responses": OpenAIResponsesModel("demo", client)}


class Sighting(BaseModel):
    model_config = ConfigDict(extra="forbid")

    place: Literal["box", "bag"]


def agent(model: Any, tool_choice: str | None = None, **fields: Any) -> Agent[None]:
    settings = ModelSettings(
        temperature=0.0, max_tokens=60, tool_choice=tool_choice, parallel_tool_calls=False if tool_choice else None
    )
    return Agent(name="cat", model=model, model_settings=settings, **fields)


def texts() -> None:
    async def run() -> None:
        for name, model in models().items():
            result = await Runner.run(agent(model), "hi")
            assert result.final_output, name

    asyncio.run(run())


def streams() -> None:
    async def run() -> None:
        for name, model in models().items():
            result = Runner.run_streamed(agent(model), "hi")
            kinds = [event.type async for event in result.stream_events()]
            assert kinds.count("raw_response_event") > 5, name
            assert result.final_output, name

    asyncio.run(run())


def tools() -> None:
    """A call is required: the demo's template has no format of its own."""
    seen: list[str] = []

    @function_tool
    def look(place: Literal["box", "bag"]) -> str:
        """Looks into something."""
        seen.append(place)
        return "A cat."

    async def run() -> None:
        for name, model in models().items():
            own = agent(model, "required", tools=[look], tool_use_behavior="stop_on_first_tool")
            result = await Runner.run(own, "Where is it?")
            assert result.final_output == "A cat.", name

    asyncio.run(run())
    assert len(seen) >= 2
    assert set(seen) <= {"box", "bag"}


def typed_output() -> None:
    async def run() -> None:
        for name, model in models().items():
            result = await Runner.run(agent(model, output_type=Sighting), "Where is the cat?")
            assert result.final_output.place in ("box", "bag"), name

    asyncio.run(run())


harness.run(texts, streams, tools, typed_output)
