"""The body of /v1/embeddings, in OpenAI's names with vLLM's additions."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from quire.entrypoints.server.chat_request import Messages, Templated
from quire.entrypoints.server.completion_request import Prompts
from quire.entrypoints.server.info_requests import EITHER_INPUT
from quire.entrypoints.server.requests_common import AnyRequest, refuse


class EmbeddingRequest(AnyRequest, Templated):
    """One or more texts, or lists of token ids, each to become a vector; or a conversation, to become one."""

    model_config = ConfigDict(json_schema_extra=EITHER_INPUT)

    input: Prompts = []
    messages: Messages = []
    """A conversation, whose text the template writes; without the assistant's turn by default."""
    encoding_format: Literal["float", "base64"] | None = None
    """base64: of 32-bit floats, the lowest byte first."""
    dimensions: int | None = Field(None, ge=1)
    """Keep the first k numbers of a vector."""
    normalize: bool | None = None
    """To length 1, by default."""
    use_activation: bool | None = None
    """vLLM's newer name of the same."""
    add_special_tokens: bool | None = None
    """By default true for input, false for messages."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    """Keep the last k; -1: what the context holds."""
    priority: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    """Lower runs first."""
    user: str | None = None
    """Whose request it is, for fair shares; an API key says it instead."""

    # Refused.
    stream: Annotated[None, refuse("vectors come whole; leave it out", False)] = None  # type: ignore[assignment]
