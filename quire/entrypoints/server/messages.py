"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from quire.entrypoints.server.body import JsonRoute
from quire.entrypoints.server.dialects.messages import MessagesDialect
from quire.entrypoints.server.event_service import EventService
from quire.entrypoints.server.messages_request import ConversationRequest, MessagesRequest
from quire.entrypoints.server.middleware import client_of, identify
from quire.entrypoints.server.request_log import request_log
from quire.entrypoints.server.sse import CONTENT_TYPES, respond
from quire.entrypoints.server.state import get_state

router = APIRouter(route_class=JsonRoute)


class TokenCount(BaseModel):
    """The tokens of a prompt."""

    input_tokens: int


@router.post("/v1/messages", tags=["messages"], responses=CONTENT_TYPES)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation."""
    state = get_state(request)
    service = EventService(state.llm, MessagesDialect(state), request_log(state.args))
    return await respond(request, service, body)


@router.post("/v1/messages/count_tokens", tags=["messages"])
async def count_tokens(body: ConversationRequest, request: Request) -> TokenCount:
    """The tokens of a conversation's prompt."""
    request_id = identify(request.scope).decode("latin-1")
    turn, _ = await MessagesDialect(get_state(request), prompt_only=True).read(
        body, request_id, client_of(request.scope)
    )
    return TokenCount(input_tokens=len(turn.prompts[0].token_ids))
