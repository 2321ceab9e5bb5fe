"""The body of /v1/chat/completions."""

from typing import Annotated, Any

from pydantic import Field

from quire.entrypoints.server.completion_request import MAX_PROMPTS
from quire.entrypoints.server.requests_common import MAX_PARTS, Fields, GenerationRequest, Objects, refuse

_Parts = Annotated[list[str | dict[str, Any]], Field(fail_fast=True, max_length=MAX_PARTS)]


class ChatMessage(Fields):
    """One message. It goes to the chat template with all fields that it came with."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    """Which roles there are is the template's matter."""
    content: str | _Parts | None = None
    """Text, or a list of text parts."""
    name: str | None = None
    tool_calls: Objects | None = None
    tool_call_id: str | None = None


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)]


class Templated(Fields):
    """How the template writes a conversation."""

    add_generation_prompt: bool | None = None
    """Open the assistant's turn; by default so in chat, unless continue_final_message is true."""
    continue_final_message: bool | None = None
    """Go on with the last message."""
    chat_template: str | None = None
    """Only where the server is told to trust requests' templates."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the template."""


class ChatCompletionRequest(GenerationRequest, Templated):
    """A conversation to answer."""

    messages: Messages
    max_tokens: int | None = Field(None, ge=1)
    """To the end of the context by default."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """Wins over max_tokens."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=-1)
    """Only with logprobs; -1: the vocabulary."""

    # The template.
    documents: Objects | None = None
    """For the template."""
    tools: Objects | None = None
    """Functions that the model may call."""
    tool_choice: str | dict[str, Any] | None = None
    """'none', 'auto', 'required', or an object: a function that is called, or allowed_tools."""
    parallel_tool_calls: bool | None = None
    """False: at most one call in an answer."""
    thinking_token_budget: int | None = Field(None, ge=-1, le=2**31)
    """Most tokens of the thought, -1 for any number; needs a server that tells thoughts apart."""
    reasoning_effort: str | None = None
    """For a template that has such a variable."""
    include_reasoning: bool | None = None
    """False: thoughts are left out, though their tokens are counted, and shown where logprobs or ids are asked for."""
    verbosity: str | None = None
    """For a template that has such a variable."""

    # Refused.
    functions: Annotated[None, refuse("superseded by tools; leave it out", [])] = None
    function_call: Annotated[None, refuse("superseded by tool_choice; leave it out", "none")] = None
    modalities: Annotated[None, refuse("this model writes text only", ["text"], [])] = None
    audio: Annotated[None, refuse("this model writes text only; leave it out")] = None
    prediction: Annotated[None, refuse("predicted outputs are not supported; leave it out")] = None
    web_search_options: Annotated[None, refuse("this server does not search the web; leave it out")] = None

    def output_limit(self) -> tuple[str, int | None]:
        """The field that bounds the output, and its value."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


class ChatBatchRequest(ChatCompletionRequest):
    """Several conversations to answer, all in the same way."""

    messages: Annotated[list[Messages], Field(min_length=1, max_length=MAX_PROMPTS)]  # type: ignore[assignment]
