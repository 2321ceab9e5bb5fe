"""Runs a turn for APIs whose streams have a form of their own: /v1/responses, /v1/messages, llama.cpp's and Ollama's.

The whole answer and the stream of it are one fold: a writer takes the deltas, keeps the answer and says the events.
Knows nothing of either API's form.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Generic, Protocol, TypeVar

from quire.entrypoints.server.errors import ErrorInfo, describe_end
from quire.entrypoints.server.parsers.base import ContentEvent
from quire.entrypoints.server.responses import encode
from quire.entrypoints.server.service import Read, TurnRequest, opened
from quire.entrypoints.server.state import ServerState
from quire.entrypoints.server.turn import Delta, Finish, Turn

_PATIENCE = 1.0  # seconds for which a stream's first events wait for a refusal

Event = dict[str, Any]
_Body = TypeVar("_Body")


class EventWriter(Protocol):
    """Writes what comes of one turn, of one choice; what an API has no form for stays as it is here."""

    turn: Turn
    finish: Finish | None = None  # once it has come

    def open(self) -> list[Event]:
        """The first events, before anything is computed."""
        return []

    def take(self, delta: Delta) -> list[Event]:
        """The events of a piece."""
        self.finish = delta.finish or self.finish
        return [event for part in delta.events for event in self.part(part)]

    def part(self, part: ContentEvent) -> list[Event]:
        """Those of a part of it: more text, more of a thought or of a call."""
        return []

    async def close(self) -> list[Event]:
        """The last events; the answer is complete then."""
        return []

    def fail(self, error: ErrorInfo) -> list[Event]:
        """The last events of a stream that failed."""
        return []

    def answer(self) -> dict[str, Any]:
        """The answer as it stands."""
        ...


async def events_of(
    state: ServerState, request: TurnRequest, writer: EventWriter, client: str | None
) -> AsyncGenerator[list[Event], None]:
    """The events of a turn but for the first ones, those of one step together.

    Raises:
        InvalidRequestError, OverloadedError, RequestFailedError, EngineDeadError: as `AsyncLLM.generate` does.
    """
    async with opened(state, request, client) as outputs:
        while batch := await outputs.next():
            deltas = (delta for place, output in batch for delta in writer.turn.take(place, output))
            events = [event for delta in deltas for event in writer.take(delta)]
            if events:
                yield events
    yield await writer.close()


def named_event(event: Event) -> bytes:
    """A server-sent event with its name."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event))


async def streamed(
    writer: EventWriter, steps: AsyncGenerator[list[Event], None], frame: Callable[[Event], bytes] = named_event
) -> AsyncGenerator[bytes, None]:
    """A stream of events: the first ones, and those of the steps; what fails then is the last of them.

    The first ones wait for the engine a little, so that what it refuses at once is raised, and an HTTP error.
    """
    opening, is_open = writer.open(), False
    first = asyncio.ensure_future(anext(steps, None))
    try:
        await asyncio.wait([first], timeout=_PATIENCE)
        if first.done():
            first.result()
        is_open = True
        yield b"".join(map(frame, opening))
        events = await first
        while events is not None:
            yield b"".join(map(frame, events))
            events = await anext(steps, None)
    except Exception as error:
        if not is_open:
            raise
        yield b"".join(map(frame, writer.fail(describe_end(error))))
    finally:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await steps.aclose()


class EventService(Generic[_Body]):
    """Answers the requests of one dialect, and keeps nothing of them."""

    def __init__(
        self, state: ServerState, read: Read[_Body, EventWriter], frame: Callable[[Event], bytes] = named_event
    ) -> None:
        """`frame`: an event as bytes of the stream."""
        self._state, self._read, self._frame = state, read, frame

    async def create(self, body: _Body, request_id: str, client: str | None = None) -> list[bytes]:
        """The whole answer as JSON. Raises as `TurnService.create` does."""
        request, writer = await self._read(self._state, body, request_id)
        async for _ in events_of(self._state, request, writer, client):
            pass
        return [encode(writer.answer())]

    async def stream(self, body: _Body, request_id: str, client: str | None = None) -> AsyncGenerator[bytes, None]:
        """The answer as events; what fails once they have begun is one of them."""
        request, writer = await self._read(self._state, body, request_id)
        async with aclosing(streamed(writer, events_of(self._state, request, writer, client), self._frame)) as parts:
            async for part in parts:
                yield part
