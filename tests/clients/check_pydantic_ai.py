"""pydantic-ai: agents over chat, responses and messages; text, streams, typed output by schema and by tools."""

from typing import Any, Literal

import harness
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

openai_provider = OpenAIProvider(base_url=f"{harness.URL}/v1", api_key="none")
MODELS: dict[str, Any] = {
    "chat": OpenAIChatModel("demo", provider=openai_provider),
    "responses": OpenAIResponsesModel("demo", provider=openai_provider),
    "messages": AnthropicModel("demo", provider=AnthropicProvider(base_url=harness.URL, api_key="none")),
}
SETTINGS: Any = {"temperature": 0.0, "max_tokens": 100}


class Sighting(BaseModel):
    model_config = ConfigDict(extra="forbid")  # or else a model that can't stop adds more and more

    place: Literal["box", "bag"]


def texts() -> None:
    for name, model in MODELS.items():
        result = Agent(model, instructions="Be brief.", model_settings=SETTINGS).run_sync("Tell me a story.")
        assert result.output, name
        assert result.usage.output_tokens > 0, name


def streams() -> None:
    for name, model in MODELS.items():
        agent = Agent(model, model_settings=SETTINGS)
        result = agent.run_stream_sync("Tell me a story.")
        pieces = list(result.stream_text(delta=True))
        assert "".join(pieces), name


def typed_by_tools() -> None:
    for name, model in MODELS.items():
        agent: Any = Agent(model, output_type=ToolOutput(Sighting), model_settings=SETTINGS)
        assert agent.run_sync("Where is the cat?").output.place in ("box", "bag"), name


def typed_by_schema() -> None:
    for name in ("chat", "responses"):
        agent: Any = Agent(MODELS[name], output_type=NativeOutput(Sighting), model_settings=SETTINGS)
        assert agent.run_sync("Where is the cat?").output.place in ("box", "bag"), name


if __name__ == "__main__":
    harness.run(texts, streams, typed_by_tools, typed_by_schema)
