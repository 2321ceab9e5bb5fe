"""/admin/prefixes: prefixes that stay in the KV cache; /reset_prefix_cache: everything forgotten.

Only a server with an API key lets its cache be changed. What may be pinned is for the KV manager to say.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from quire.entrypoints.server.body import JsonRoute
from quire.entrypoints.server.chat_request import Messages
from quire.entrypoints.server.info_requests import TokenId
from quire.entrypoints.server.prompts import conversation_text
from quire.entrypoints.server.state import Changeable, State
from quire.errors import InvalidRequestError
from quire.protocol.cache import PinnedPrefix

router = APIRouter(route_class=JsonRoute)


class PinRequest(BaseModel):
    """The beginning of prompts to come: `prompt`, text or token ids, or `messages`."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]}
    )

    prompt: Annotated[str, Field(strict=True)] | Annotated[list[TokenId], Field(fail_fast=True)] = ""
    messages: Messages = []
    cache_salt: str | None = Field(None, min_length=1, description="For requests of the same salt only.")
    name: str | None = Field(None, min_length=1, max_length=200, description="To unpin it by; one is made up if unset.")


class Prefix(BaseModel):
    """A pinned prefix."""

    model_config = ConfigDict(from_attributes=True)

    name: str
    num_tokens: int = Field(description="Whole KV blocks of the prompt.")
    num_blocks: int


class PrefixList(BaseModel):
    """All pinned prefixes, in the order in which they were pinned."""

    data: list[Prefix]


@router.get("/admin/prefixes", tags=["admin"])
async def list_prefixes(state: State) -> PrefixList:
    """What is pinned."""
    return PrefixList(data=[Prefix.model_validate(prefix) for prefix in await state.llm.pinned_prefixes()])


@router.post("/admin/prefixes", tags=["admin"], response_model=Prefix)
async def pin_prefix(body: PinRequest, state: Changeable) -> PinnedPrefix:
    """Compute a prompt, and keep its blocks whatever else comes. Of a conversation: up to its last message's end."""
    if ("messages" in body.model_fields_set) == ("prompt" in body.model_fields_set):
        raise InvalidRequestError("give either prompt or messages.", "prompt")
    is_chat = "messages" in body.model_fields_set
    prompt: dict[str, Any] = {} if body.cache_salt is None else {"cache_salt": body.cache_salt}
    if is_chat:
        messages = [message.model_dump(exclude_unset=True) for message in body.messages]
        prompt["prompt"] = await conversation_text(state, messages, chat_template=None, add_generation_prompt=False)
    else:
        prompt["prompt" if isinstance(body.prompt, str) else "prompt_token_ids"] = body.prompt
    return await state.llm.pin_prefix(prompt, body.name, add_special_tokens=not is_chat)  # type: ignore[arg-type]


@router.delete("/admin/prefixes/{name:path}", tags=["admin"])
async def unpin_prefix(name: str, state: Changeable) -> Response:
    """Let it be evicted like all others."""
    if not await state.llm.unpin_prefix(name):
        raise HTTPException(404, f"no prefix {name!r} is pinned.")
    return Response(status_code=200)


@router.post("/reset_prefix_cache", tags=["admin"], responses={409: {"description": "Requests are running."}})
async def reset_prefix_cache(state: Changeable) -> Response:
    """Forget all cached prefixes, and pins; 409 while requests are running."""
    if not await state.llm.reset_prefix_cache():
        raise HTTPException(409, "requests are running, and nothing was forgotten; try again when none is.")
    return Response(status_code=200)
