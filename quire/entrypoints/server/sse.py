"""How a service's answer goes to the client: as JSON, or as server-sent events; and its end when the client leaves.

All routes that have the model answer call `respond`. Each item of a service's stream, which holds all that one engine
step has for the connection, is one `send`. Knows nothing of what is in the events.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.entrypoints.server.errors import describe_end, error_body
from quire.entrypoints.server.middleware import client_of, identify
from quire.entrypoints.server.requests_common import AnyRequest
from quire.entrypoints.server.responses import encode
from quire.entrypoints.server.unknown_fields import warn_client

_EVENTS = "text/event-stream"
DONE = b"data: [DONE]\n\n"


def content_types(media_type: str) -> dict[int | str, dict[str, Any]]:
    """What a route may answer with besides errors, for the OpenAPI description; `media_type`: of a stream."""
    return {200: {"description": "The answer, or a stream of it.", "content": {media_type: {}}}}


CONTENT_TYPES = content_types(_EVENTS)
_Body = TypeVar("_Body", bound=AnyRequest, contravariant=True)
_Result = TypeVar("_Result")


class Service(Protocol[_Body]):
    """What answers one kind of request."""

    async def create(self, body: _Body, request_id: str, client: str | None = None) -> list[bytes]: ...
    def stream(self, body: _Body, request_id: str, client: str | None = None) -> AsyncGenerator[bytes, None]: ...


async def respond(request: Request, service: Service[_Body], body: _Body, media_type: str = _EVENTS) -> Response:
    """The response to a request, of the kind that its body asks for. `media_type`: of a stream."""
    request_id, client = identify(request.scope), client_of(request.scope)
    if body.stream:
        return EventStream(service.stream(body, request_id, client), media_type, body)
    answer = await while_connected(request.receive, service.create(body, request_id, client))
    if answer is None:
        return Response(status_code=499)  # for the log: nobody reads it
    response = JsonParts(answer)
    warn_client(response, body)
    return response


def event(data: Any) -> bytes:
    """An event without a name."""
    return b"data: %b\n\n" % encode(data)


class JsonParts(Response):
    """A JSON text in several parts, each of which is one send: nobody needs it in one piece."""

    media_type = "application/json"

    def __init__(self, parts: list[bytes]) -> None:
        self.status_code, self.background = 200, None
        self.init_headers({"content-length": str(sum(map(len, parts)))})
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for place, part in enumerate(self._parts, 1):
            await send({"type": "http.response.body", "body": part, "more_body": place < len(self._parts)})


class EventStream(Response):
    """Sends events as they come. Nothing is sent before the first, so that a refusal is a plain HTTP error."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], media_type: str = _EVENTS, body: AnyRequest | None = None
    ) -> None:
        """`body`: the request's, whose fields of no effect are told once it is read."""
        self.status_code, self.media_type, self.background = 200, media_type, None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events, self._body = events, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            data: bytes | None = await anext(events, b"")  # none, of a response that was cancelled
            if self._body is not None:
                warn_client(self, self._body)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while data is not None:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                try:
                    data = await anext(events, None)
                except Exception as error:
                    data = b"data: %b\n\n" % error_body(describe_end(error)) + DONE
        await send({"type": "http.response.body", "body": b""})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result | None:
    """The result of `work`, or None when the client leaves first: `work` is cancelled then."""
    limit = asyncio.timeout(None)  # until the client leaves
    watcher = asyncio.create_task(_end_with_client(receive, limit))
    try:
        async with limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        return None
    finally:
        watcher.cancel()


async def _end_with_client(receive: Receive, limit: asyncio.Timeout) -> None:
    with suppress(Exception):  # a connection that can't be read is gone too
        while (await receive())["type"] != "http.disconnect":
            pass
    limit.reschedule(asyncio.get_running_loop().time())
