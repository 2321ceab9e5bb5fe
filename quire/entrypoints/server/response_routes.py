"""/v1/responses: make a response, ask for it, for its input, cancel it, delete it. OpenAI's API.

`ResponsesService`, which `build_app` hangs on the app, does the work.
"""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response

from quire.entrypoints.server.body import JsonRoute
from quire.entrypoints.server.middleware import client_of, identify
from quire.entrypoints.server.responses import encode
from quire.entrypoints.server.responses_request import ResponsesRequest
from quire.entrypoints.server.responses_service import ResponsesService
from quire.entrypoints.server.sse import CONTENT_TYPES, EventStream, JsonParts, respond
from quire.entrypoints.server.state import get_state
from quire.errors import InvalidRequestError, NotYetSupportedError

router = APIRouter(route_class=JsonRoute)


def _service(request: Request) -> ResponsesService:
    return request.app.state.responses.of(get_state(request))


Service = Annotated[ResponsesService, Depends(_service)]
PATH = "/v1/responses"


@router.post(PATH, tags=["responses"], responses=CONTENT_TYPES)
async def create_response(body: ResponsesRequest, request: Request, service: Service) -> Response:
    """Answer an input; what is stored can be gone on from."""
    return await respond(request, service, body)


@router.post(f"{PATH}/input_tokens", tags=["responses"])
async def count_input_tokens(body: ResponsesRequest, request: Request, service: Service) -> dict[str, Any]:
    """The tokens of such an input."""
    turn, _ = await service.read(body, identify(request.scope), client_of(request.scope))
    return {"object": "response.input_tokens", "input_tokens": len(turn.prompts[0].token_ids)}


@router.post(f"{PATH}/compact", include_in_schema=False)
async def compact() -> None:
    """Not here."""
    remedy = "'truncation': 'auto' in a request drops the oldest turns of a long conversation"
    raise NotYetSupportedError(f"{PATH}/compact is not supported: {remedy}.")


@router.get(f"{PATH}/{{response_id}}", tags=["responses"], responses=CONTENT_TYPES)
async def get_response(
    response_id: str,
    request: Request,
    service: Service,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(description="Number of the last event seen; with stream.")] = None,
) -> Response:
    """A stored response; one that was made with background and stream also as its events."""
    client = client_of(request.scope)
    if stream:
        start = 0 if starting_after is None else max(0, starting_after + 1)
        return EventStream(service.follow(response_id, client, start))
    if starting_after is not None:
        raise InvalidRequestError("starting_after needs stream=true.", "starting_after")
    return JsonParts([encode((await service.get(response_id, client)).response)])


@router.delete(f"{PATH}/{{response_id}}", tags=["responses"])
async def delete_response(response_id: str, request: Request, service: Service) -> dict[str, Any]:
    """Forget a response."""
    await service.delete(response_id, client_of(request.scope))
    return {"id": response_id, "object": "response", "deleted": True}


@router.post(f"{PATH}/{{response_id}}/cancel", tags=["responses"])
async def cancel_response(response_id: str, request: Request, service: Service) -> Response:
    """End a response in the background."""
    return JsonParts([encode(await service.cancel(response_id, client_of(request.scope)))])


@router.get(f"{PATH}/{{response_id}}/input_items", tags=["responses"])
async def list_input_items(
    response_id: str,
    request: Request,
    service: Service,
    after: Annotated[str | None, Query(description="Id of the last item seen.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """The items that a response answers."""
    items = (await service.get(response_id, client_of(request.scope))).input
    items = items if order == "asc" else items[::-1]
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise InvalidRequestError(f"after: no item with the id {after!r:.80} is in this list.", "after")
        items = items[places[0] + 1 :]
    page = items[:limit]
    ends = {"first_id": page[0]["id"] if page else "", "last_id": page[-1]["id"] if page else ""}
    return JsonParts([encode({"object": "list", "data": page, "has_more": len(items) > limit, **ends})])
