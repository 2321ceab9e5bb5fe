"""The bodies of /v1/messages and /v1/messages/count_tokens: Anthropic's fields, and those that all requests have here.

What blocks and tools hold is read in `dialects.messages_input`.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from quire.entrypoints.server.requests_common import MAX_PARTS, MAX_STOPS, Fields, GenerationRequest, Objects, Word

Blocks = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_PARTS)]


class MessageParam(Fields, extra="ignore"):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class ConversationRequest(GenerationRequest):
    """A conversation whose tokens may be counted."""

    messages: Annotated[list[MessageParam], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)]
    max_tokens: int | None = Field(None, ge=1)
    system: str | Blocks | None = None
    stop_sequences: Annotated[list[Word], Field(max_length=MAX_STOPS)] | None = None
    thinking: dict[str, Any] | None = None
    """enabled (with budget_tokens), adaptive or disabled."""
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None
    """auto, any, tool (with its name) or none."""
    output_config: dict[str, Any] | None = None
    """format: a JSON schema; effort."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the template."""

    # Accepted, and of no effect: caching needs no marks here, the rest is Anthropic's own, and clears what is old of
    # conversations that are too long, which agents ask for with every request.
    context_management: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    inference_geo: str | None = None
    speed: str | None = None


class MessagesRequest(ConversationRequest):
    """A conversation to answer."""

    max_tokens: int = Field(ge=1)  # type: ignore[assignment]  # required here
