"""POST /v1/completions: the route, and the service behind it, which `quire run-batch` uses too."""

from fastapi import APIRouter, Request, Response

from quire.entrypoints.server.body import JsonRoute
from quire.entrypoints.server.completion_request import CompletionRequest
from quire.entrypoints.server.dialects.completions import CompletionDialect
from quire.entrypoints.server.request_log import request_log
from quire.entrypoints.server.service import TurnService
from quire.entrypoints.server.sse import CONTENT_TYPES, respond
from quire.entrypoints.server.state import ServerState, get_state

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions", tags=["completions"], responses=CONTENT_TYPES)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Go on with one or more prompts."""
    return await respond(request, completion_service(get_state(request)), body)


def completion_service(state: ServerState) -> TurnService[CompletionRequest]:
    """What answers completion requests, over HTTP or not."""
    return TurnService(state.llm, CompletionDialect(state), request_log(state.args))
