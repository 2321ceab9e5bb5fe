"""POST /v1/chat/completions: the route, and the service behind it, which `quire run-batch` uses too."""

from fastapi import APIRouter, Request, Response

from quire.entrypoints.server.body import JsonRoute
from quire.entrypoints.server.chat_request import ChatCompletionRequest
from quire.entrypoints.server.dialects.chat import ChatDialect
from quire.entrypoints.server.request_log import request_log
from quire.entrypoints.server.service import TurnService
from quire.entrypoints.server.sse import CONTENT_TYPES, respond
from quire.entrypoints.server.state import ServerState, get_state

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", tags=["chat"], responses=CONTENT_TYPES)
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation."""
    return await respond(request, chat_service(get_state(request)), body)


def chat_service(state: ServerState) -> TurnService[ChatCompletionRequest]:
    """What answers chat requests, over HTTP or not."""
    return TurnService(state.llm, ChatDialect(state), request_log(state.args))
