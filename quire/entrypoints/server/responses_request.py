"""The body of /v1/responses: OpenAI's fields, and those that all requests have here.

What items and tools hold is read in `dialects.responses_input`.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from quire.entrypoints.server.requests_common import MAX_PARTS, Fields, GenerationRequest, Objects, refuse

_Items = Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)]
_Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class TextSettings(Fields):
    """What the answer's text is like."""

    format: dict[str, Any] | None = None
    """text, json_object, or json_schema with name and schema."""
    verbosity: str | None = None
    """For a template that has such a variable."""


class ReasoningSettings(Fields):
    """How the model thinks before it answers."""

    effort: str | None = None
    """For a template that can be told."""
    summary: str | None = None
    """Thoughts are shown whole, and not summed up."""
    generate_summary: str | None = None


class ResponsesRequest(GenerationRequest):
    """An input to answer, as text or as items."""

    input: str | _Items = Field()
    """A user's text, or a list of input items."""
    instructions: str | None = None
    """A system message, for this response only."""
    previous_response_id: str | None = None
    """A stored response to go on from."""
    max_output_tokens: int | None = Field(None, ge=1)
    """To the end of the context by default."""
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    tools: Objects | None = None
    """Functions."""
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[_Include], Field(max_length=100)] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    truncation: Literal["auto", "disabled"] | None = None
    """auto: leave out the oldest items where the input is too long."""
    background: bool | None = None
    """Answer at once, and compute meanwhile; needs store."""
    include_reasoning: bool | None = None
    """False: thoughts are left out, though their tokens are counted."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the template."""

    # Accepted, and of no effect: there are no tools but functions.
    max_tool_calls: int | None = None

    # Refused.
    conversation: Annotated[None, refuse("conversations are not kept here; go on with previous_response_id")] = None
    prompt: Annotated[None, refuse("prompt templates are not kept by this server; send the text as input")] = None
    context_management: Annotated[None, refuse("not supported by this server; leave it out", [])] = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text's tokens are shown with their logprobs."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())


def flat_name(function: dict[str, Any]) -> str:
    """What a model calls a function, which may be of a namespace."""
    return "__".join(filter(None, (function.get("namespace"), function["name"])))
