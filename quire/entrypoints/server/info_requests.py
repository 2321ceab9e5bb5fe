"""Bodies and answers of the routes that tell about the server and its tokenizer, in vLLM's form."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StrictBool, StrictStr, model_validator
from pydantic.config import JsonDict

from quire.entrypoints.server.chat_request import Messages
from quire.entrypoints.server.requests_common import Objects
from quire.errors import InvalidRequestError

# Of a body's schema.
EITHER: JsonDict = {"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]}
EITHER_INPUT: JsonDict = {"oneOf": [{"required": ["input"]}, {"required": ["messages"]}]}
TokenId = Annotated[int, Field(ge=0, lt=2**32, strict=True)]


def is_chat(body: BaseModel, other: str = "prompt") -> bool:
    """Whether a body that has either messages or what `other` names has messages.

    Raises:
        InvalidRequestError: it has both, or neither.
    """
    if len(given := {other, "messages"} & body.model_fields_set) != 1:
        raise InvalidRequestError(f"give either {other} or messages.", other)
    return "messages" in given


class TokenizeRequest(BaseModel, extra="allow", json_schema_extra=EITHER):
    """A text, or a conversation, to encode: `prompt` or `messages`."""

    model: StrictStr | None = None
    prompt: StrictStr = Field("", description="llama.cpp's content is the same, without special tokens by default.")
    messages: Messages = []
    add_special_tokens: StrictBool | None = Field(None, description="True for a prompt, false for messages by default.")
    return_token_strs: StrictBool | None = Field(False, description="Show each token as the vocabulary spells it.")
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    tools: Objects | None = None
    chat_template: StrictStr | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_llama_cpp(cls, body: Any) -> Any:
        if not isinstance(body, dict) or "content" not in body or "prompt" in body:
            return body
        own = {"prompt": body["content"], "add_special_tokens": body.get("add_special", False)}
        return own | {name: value for name, value in body.items() if name not in ("content", "add_special")}


class TokenizeResponse(BaseModel):
    """Token ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None = None


class DetokenizeRequest(BaseModel, extra="allow"):
    """Token ids to decode."""

    model: StrictStr | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class DetokenizeResponse(BaseModel):
    """Their text."""

    prompt: str
    content: str = Field(description="The same, in llama.cpp's name.")


class TokenizerInfo(BaseModel):
    """What a client has to know to count tokens by itself."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    additional_special_tokens: list[str]
    chat_template: str | dict[str, str] | None


class ModelCard(BaseModel):
    """A name that requests may give for the model."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "quire"
    root: str  # what was given to serve under the name: a path or a hub id
    parent: str | None = None  # of an adapter: the model that it is for
    max_model_len: int


class ManagedModelCard(ModelCard):
    """One of several models behind the server, which loads and unloads it."""

    max_model_len: int | None  # type: ignore[assignment]  # None: its files can't be read
    state: Literal["unloaded", "loading", "ready", "unloading"]
    size: int = Field(description="Bytes of its weights on the disk.")
    memory: int = Field(description="Bytes of memory that its processes hold now; 0 while it is not loaded.")
    num_requests: int = Field(description="That it has, or that wait for it.")
    error: str | None = Field(description="Why it did not load when it was last tried.")


class ModelList(BaseModel):
    """All of them."""

    object: str = "list"
    data: list[ManagedModelCard | ModelCard]


class Engine(BaseModel):
    """One of the engines behind the server."""

    rank: int = Field(description="Its label in /metrics.")
    state: Literal["up", "draining", "starting"] = Field(description="Draining: it finishes what it has, and restarts.")
    num_requests: int
    num_restarts: int


class Load(BaseModel):
    """How busy the server is."""

    server_load: int = Field(description="Requests in flight.")
