"""The body of /v1/embeddings, in OpenAI's names with vLLM's additions."""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from quire.entrypoints.server.chat_request import Messages, Templated
from quire.entrypoints.server.completion_request import MAX_PROMPTS, Prompts
from quire.entrypoints.server.info_requests import EITHER_INPUT
from quire.entrypoints.server.requests_common import AnyRequest, Fields, refuse


def _several(value: Any) -> Any:
    """One conversation as a list of them."""
    return [value] if isinstance(value, list) and value and not isinstance(value[0], list) else value


_Conversations = Annotated[
    Annotated[list[Messages], Field(min_length=1, max_length=MAX_PROMPTS)],
    BeforeValidator(_several, json_schema_input_type=Messages | list[Messages]),
]


class PooledRequest(AnyRequest):
    """What every request has whose texts are read, and not gone on with."""

    use_activation: bool | None = None
    """False: what the model says, as it is; a vector is of length 1 by default."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    """Keep the last k; -1: what the context holds."""
    priority: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    """Lower runs first."""
    user: str | None = None
    """Whose request it is, for fair shares; an API key says it instead."""

    # Refused.
    stream: Annotated[None, refuse("vectors come whole; leave it out", False)] = None  # type: ignore[assignment]


class EmbeddingRequest(PooledRequest, Templated, json_schema_extra=EITHER_INPUT):
    """One or more texts, lists of token ids, or conversations, each to become a vector."""

    input: Prompts = []
    messages: _Conversations = []
    """A conversation (or several), whose text the template writes; without the assistant's turn by default."""
    encoding_format: Literal["float", "base64"] | None = None
    """base64: of 32-bit floats, the lowest byte first."""
    dimensions: int | None = Field(None, ge=1)
    """Keep the first k numbers of a vector."""
    normalize: bool | None = None
    """To length 1, by default; use_activation is vLLM's newer name of the same."""
    task: Literal["embed", "classify"] | None = None
    """By default what the model can: it embeds, or with a head for classes it classifies."""
    add_special_tokens: bool | None = None
    """By default true for input, false for messages."""


class TextDocument(Fields):
    """A text as an object, as Cohere's and Jina's clients send it."""

    text: Annotated[str, Field(min_length=1)]


_Text = Annotated[str, Field(min_length=1)] | TextDocument
_Texts = _Text | Annotated[list[_Text], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS - 1)]


class ScoreRequest(PooledRequest):
    """Texts in pairs: one on each side, as many on both, or one for all of the others."""

    text_1: _Texts = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    """Or as queries, or data_1."""
    text_2: _Texts = Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))
    """Or as documents, items, or data_2."""


class RerankRequest(ScoreRequest):
    """Documents to sort by how well they answer a query."""

    text_1: _Text = Field(validation_alias="query")  # type: ignore[assignment]
    text_2: _Texts = Field(validation_alias="documents")
    top_n: int | None = None
    """So many of the best; all, if left out or 0."""
