"""Makes, keeps, tells, cancels and forgets responses: what is behind the routes of /v1/responses.

One for a server. A response in the background is a task of its own, a `_Job`, whose events readers follow or come back
to. `quire.entrypoints.server.response_routes` calls it.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from copy import copy
from functools import partial
from typing import Any

import msgspec

from quire.entrypoints.server.dialects.responses import ResponseWriter, read_response
from quire.entrypoints.server.errors import describe_end
from quire.entrypoints.server.event_service import Event, events_of, named_event, streamed
from quire.entrypoints.server.response_store import open_store
from quire.entrypoints.server.responses import encode
from quire.entrypoints.server.responses_request import ResponsesRequest
from quire.entrypoints.server.service import Asked, TurnRequest
from quire.entrypoints.server.state import ServerState
from quire.errors import InvalidRequestError, QuireError
from quire.utils.logs import logger

_STEM = 32  # characters of an id's random part
_Items = dict[str, dict[str, Any]]  # by their ids
_LOST = {"code": "server_error", "message": "the server was stopped before this response was complete."}


class ResponseNotFoundError(InvalidRequestError):
    """There is no such response, or it is another client's: which of the two is not told."""

    def __init__(self, response_id: str, param: str | None = None) -> None:
        message = f"no response with the id {response_id!r:.80} is stored (it may be too old, or have store: false)."
        super().__init__(message, param, "not_found" if param is None else "previous_response_not_found")


class StoredResponse(msgspec.Struct):
    """What is kept of a response."""

    response: dict[str, Any]
    input: list[dict[str, Any]]  # with what came before it
    events: list[bytes] = []  # by their numbers; of a stream in the background only


class _Job:
    """A response that is made, in the background or not."""

    def __init__(
        self, body: ResponsesRequest, client: str | None, request: TurnRequest, writer: ResponseWriter
    ) -> None:
        self.body, self.client, self.request, self.writer = body, client, request, writer
        self.owner, self.keeps_events = client or "", bool(body.background and body.stream)
        self.events: list[bytes] = []
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None]  # in the background

    def tell(self, events: list[Event]) -> None:
        if self.keeps_events:
            self.events += map(named_event, events)
            self.changed.set()
            self.changed = asyncio.Event()

    def stored(self) -> StoredResponse:
        return StoredResponse(self.writer.answer(), self.writer.items, self.events)


class ResponsesService:
    """Answers requests for responses, and about them."""

    def __init__(self, state: ServerState) -> None:
        """Raises ConfigError where the store can't be opened."""
        self._state, args = state, state.args
        self._store = open_store(args.response_store, args.response_store_max_bytes, args.response_store_seconds)
        self._jobs: dict[str, _Job] = {}

    def of(self, state: ServerState) -> "ResponsesService":
        """The same responses, where those that are made are of this state's model."""
        other = copy(self)
        other._state = state
        return other

    # Making them.

    async def create(self, body: ResponsesRequest, request_id: str, client: str | None = None) -> list[bytes]:
        """The whole answer as JSON; in the background, what there is of it yet. Raises as `TurnService.create`."""
        job = _Job(body, client, *await self.read(body, request_id, client))
        if body.background:
            await self._start(job)
        else:
            async for _ in self._events(job):
                pass
        return [encode(job.writer.answer())]

    async def stream(
        self, body: ResponsesRequest, request_id: str, client: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events; what fails once they have begun is one of them."""
        job = _Job(body, client, *await self.read(body, request_id, client))
        if body.background:
            await self._start(job)
        async with aclosing(_follow(job, 0) if body.background else streamed(job.writer, self._events(job))) as parts:
            async for part in parts:
                yield part

    async def read(self, body: ResponsesRequest, request_id: str, client: str | None) -> Asked[ResponseWriter]:
        """Check a request, and whatever earlier responses it names.

        Raises:
            InvalidRequestError, OverloadedError: as `Read`.
            ResponseNotFoundError: the previous response is not there.
        """
        if body.background and body.store is False:
            raise InvalidRequestError("background needs store: true, or nobody could ask for the answer.", "background")
        context: list[dict[str, Any]] = []
        if body.previous_response_id is not None:
            previous = await self.get(body.previous_response_id, client, "previous_response_id")
            if previous.response["status"] in ("queued", "in_progress"):
                message = f"the response {body.previous_response_id!r} is not complete yet; wait for it."
                raise InvalidRequestError(message, "previous_response_id")
            context = previous.input + previous.response["output"]
        find = partial(self._find_item, client, {})
        return await read_response(self._state, body, request_id, context, find)

    async def _find_item(self, client: str | None, known: dict[str, _Items], item_id: str) -> dict[str, Any]:
        """An item of an earlier response, whose id the item's tells; `known`: those of responses looked at so far."""
        stem = item_id.partition("_")[2][:_STEM]
        if stem not in known:
            known[stem] = {}
            await asyncio.sleep(0)  # many of them take long together
            with suppress(ResponseNotFoundError):
                found = await self.get(f"resp_{stem}", client)
                known[stem] = {item["id"]: item for item in found.input + found.response["output"]}
        if item_id not in known[stem]:
            raise InvalidRequestError(f"no item with the id {item_id!r:.80} is stored; send it whole.", "input")
        return known[stem][item_id]

    async def _events(self, job: _Job) -> AsyncGenerator[list[Event], None]:
        """The events of a turn; what is to be kept is kept before its last ones are told."""
        async with aclosing(events_of(self._state, job.request, job.writer, job.client)) as steps:
            async for events in steps:
                if not job.writer.is_open and job.body.store is not False and not job.body.background:
                    await self._keep(job)
                yield events

    async def _keep(self, job: _Job) -> None:
        await self._store.put(job.writer.id, job.owner, msgspec.msgpack.encode(job.stored()))

    async def _start(self, job: _Job) -> None:
        if job.request.refusal is not None:
            raise job.request.refusal
        self._state.llm.check_room(1)
        await self._keep(job)
        self._jobs[job.writer.id] = job  # nobody was told its id yet
        job.task = asyncio.create_task(self._run(job))
        if self._state.retain is not None:
            job.task.add_done_callback(self._state.retain())

    async def _run(self, job: _Job) -> None:
        writer = job.writer
        last: list[Event] = []
        self._state.num_in_flight += 1
        try:
            job.tell(writer.open())
            async with aclosing(self._events(job)) as steps:
                async for events in steps:
                    if writer.is_open:
                        job.tell(events)
                    else:
                        last = events
        except asyncio.CancelledError:
            writer.cancel()
        except Exception as error:
            last = writer.fail(describe_end(error))
        if job.keeps_events:
            job.events += map(named_event, last)
        try:
            if self._jobs.get(writer.id) is job:  # it was not deleted meanwhile
                await self._keep(job)
        except QuireError as error:
            logger.error("response %s is lost: %s", writer.id, error)
        finally:
            self._state.num_in_flight -= 1
            self._jobs.pop(writer.id, None)
            job.changed.set()

    # Asking about them.

    async def get(self, response_id: str, client: str | None, param: str | None = None) -> StoredResponse:
        """A response of this client's.

        Raises:
            ResponseNotFoundError: it has none of that id. `param`: the field that named it.
        """
        if (job := self._jobs.get(response_id)) is not None and job.owner == (client or ""):
            return job.stored()
        data = await self._store.get(response_id, client or "")
        if data is None:
            raise ResponseNotFoundError(response_id, param)
        stored = msgspec.msgpack.decode(data, type=StoredResponse)
        if param is not None and len(data) - sum(map(len, stored.events)) > self._state.args.max_body_bytes:
            raise InvalidRequestError(f"the conversation up to {response_id!r} is too long; begin another one.", param)
        if stored.response["status"] in ("queued", "in_progress") and response_id not in self._jobs:
            stored.response |= {"status": "failed", "error": _LOST}
        return stored

    async def follow(self, response_id: str, client: str | None, start: int) -> AsyncGenerator[bytes, None]:
        """The events of a stream in the background, from this number on.

        Raises:
            ResponseNotFoundError: as `get`.
            InvalidRequestError: it was not made as such a stream.
        """
        job, events = self._jobs.get(response_id), (await self.get(response_id, client)).events
        if not events and (job is None or not job.keeps_events):
            message = "only a response that was made with background: true and stream: true can be streamed again."
            raise InvalidRequestError(message, "stream")
        if job is None:
            yield b"".join(events[start:])
            return
        async for part in _follow(job, start):  # which has nothing to close
            yield part

    async def cancel(self, response_id: str, client: str | None) -> dict[str, Any]:
        """End a response in the background; one that has ended is told as it is.

        Raises:
            ResponseNotFoundError: as `get`.
            InvalidRequestError: it is none in the background.
        """
        stored = await self.get(response_id, client)
        if not stored.response["background"]:
            raise InvalidRequestError("only a response that was made with background: true can be cancelled.")
        if (job := self._jobs.get(response_id)) is not None:
            if job.writer.is_open:
                job.task.cancel()
            await asyncio.wait([job.task])
            stored = await self.get(response_id, client)
        return stored.response

    async def delete(self, response_id: str, client: str | None) -> None:
        """Forget a response; one in the background is ended.

        Raises:
            ResponseNotFoundError: as `get`.
        """
        await self.get(response_id, client)
        if (job := self._jobs.pop(response_id, None)) is not None:
            job.task.cancel()
            await asyncio.wait([job.task])
        await self._store.delete(response_id, client or "")


async def _follow(job: _Job, start: int) -> AsyncGenerator[bytes, None]:
    """The events of a job from this number on, as they come; leaving does not end the job."""
    while True:
        changed = job.changed
        if parts := job.events[start:]:
            start += len(parts)
            yield b"".join(parts)
        elif changed.is_set():
            return
        else:
            await changed.wait()
