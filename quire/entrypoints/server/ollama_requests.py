"""The bodies of Ollama's API. What of its options has no effect here, `unknown_fields` tells the client."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from quire.entrypoints.server.completion_request import MAX_PROMPTS
from quire.entrypoints.server.requests_common import MAX_PARTS, AnyRequest, Fields, LlamaSampling, Objects, refuse

_Texts = Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)]
_TEXT_ONLY = refuse("this model takes text only; leave it out", [])


class OllamaOptions(LlamaSampling):
    """How to draw, and how much."""

    num_predict: int | None = None
    """Below 1: to the end of the context, as by default."""


class OllamaRequest(AnyRequest):
    """What its two ways to ask have in common."""

    stream: bool | None = True
    options: OllamaOptions | None = None
    format: str | dict[str, Any] | None = None
    """'json', or a schema."""
    think: bool | str | None = None
    """Whether to think, or how much; for a model that can."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    """How many in the place of each token; only with logprobs."""
    keep_alive: str | float | None = None
    """Of no effect: the server's own --keep-alive holds."""


class OllamaEmbedRequest(AnyRequest):
    """Texts that are to become vectors."""

    is_old: ClassVar[bool] = False  # the older route's: one text, and its vector as it is
    input: Annotated[str | _Texts, Field(min_length=1)]
    truncate: bool | None = None
    """False: what is too long is refused, and not cut."""
    dimensions: int | None = Field(None, ge=1)
    options: OllamaOptions | None = None
    keep_alive: str | float | None = None
    """Of no effect: the server's own --keep-alive holds."""

    # Refused.
    stream: Annotated[None, refuse("vectors come whole; leave it out", False)] = None  # type: ignore[assignment]


class OllamaOldEmbedRequest(OllamaEmbedRequest):
    """A text that is to become a vector."""

    is_old: ClassVar[bool] = True
    input: Annotated[str, Field(min_length=1, validation_alias="prompt")]  # type: ignore[assignment]


class OllamaMessage(Fields, extra="ignore"):
    """A message of a conversation."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Objects | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None
    """Of a result: which call it is of, where several are open."""
    images: Annotated[None, _TEXT_ONLY] = None


class OllamaChatRequest(OllamaRequest):
    """A conversation to answer; without messages the model is only loaded."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True, max_length=MAX_PARTS)] = []
    tools: Objects | None = None


class OllamaGenerateRequest(OllamaRequest):
    """A prompt to answer; without one the model is only loaded."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    """The prompt is one already: no template."""

    # Refused.
    suffix: Annotated[None, refuse("filling in before a suffix is not supported; leave it out", "")] = None
    template: Annotated[None, refuse("templates of requests are not supported; give a raw prompt", "")] = None
    context: Annotated[None, refuse("superseded by /api/chat, which takes the conversation", [])] = None
    images: Annotated[None, _TEXT_ONLY] = None


OllamaQuestion = OllamaChatRequest | OllamaGenerateRequest
