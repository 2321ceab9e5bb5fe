"""Runs a turn: reads a body in some dialect, asks the engine, and gives the answer in that dialect, whole or streamed.

The routes, and `quire run-batch`, make a `TurnService` with the dialect of their API. What may hold up the event loop
is built and encoded in a thread. Knows nothing of any dialect's form.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, groupby
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from quire.engine.output_stream import OutputStream
from quire.entrypoints.server.parsers.base import TextDelta
from quire.entrypoints.server.responses import encode
from quire.entrypoints.server.sampling import named
from quire.entrypoints.server.sse import DONE, event
from quire.entrypoints.server.state import ServerState
from quire.entrypoints.server.turn import Delta, Turn
from quire.errors import InvalidRequestError
from quire.inputs import PreparedPrompt
from quire.lora.request import AdapterRequest
from quire.outputs import RequestOutput
from quire.protocol.requests import Terms
from quire.sampling_params import SamplingParams
from quire.utils.logs import logger, quoted

_STARTED_TOGETHER = 16  # requests begun before the event loop gets a turn
_MANY = 5000  # tokens, and alternatives to them, of an answer: to write more is for a thread
_MOST_LOGGED = 100  # prompts of a request that the log shows, where the operator wants them there
_MARK = "\0"  # a text to be found in an event
_PART = 1 << 18  # bytes that are written at once, about

Batch = list[tuple[int, RequestOutput]]  # (place of the prompt, output)
_Body = TypeVar("_Body")
_Writer = TypeVar("_Writer")


@dataclass(frozen=True)
class TurnRequest:
    """A body that was read: what the engine is asked for."""

    request_id: str
    prompts: list[PreparedPrompt]
    params: SamplingParams
    terms: Terms
    lora_request: AdapterRequest | None = None
    names: Mapping[str, str] = field(default_factory=dict)  # what the engine's parameters are called in the body
    refusal: InvalidRequestError | None = None  # why it can't be run, though the prompt may be looked at


class Writer(Protocol):
    """Writes what comes of one turn."""

    turn: Turn
    ends_with_usage: bool  # a stream
    opens_large: bool  # choices begin with so much that a thread is to write it

    def chunk(self, delta: Delta) -> msgspec.Struct:
        """The event of a piece of a choice. Where `Turn.tells_text`, they differ in their text alone."""
        ...

    def usage_chunk(self) -> msgspec.Struct:
        """The last event of a stream that ends with its usage."""
        ...

    def choice(self, delta: Delta) -> msgspec.Struct:
        """A whole choice."""
        ...

    def answer(self, choices: list[Any], output: RequestOutput) -> msgspec.Struct:
        """The answer that is not streamed. `output`: the first prompt's."""
        ...


Asked = tuple[TurnRequest, _Writer]
# Reads a body of one API, its request's id given, and checks everything before anything is queued. It raises
# InvalidRequestError where the request is refused, and OverloadedError where the engine has no room for it.
Read = Callable[[ServerState, _Body, str], Awaitable[Asked[_Writer]]]


class Outlet(Protocol):
    """The way to a client past the layers of the application: for the middle of a stream's body."""

    @property
    def is_ready(self) -> bool:
        """Whether the body has begun, and the client is there and reads it."""
        ...

    def write(self, data: bytes) -> None:
        """Send more of the body now."""
        ...


class Outputs:
    """What the engine makes of a request's prompts, as it comes: places and outputs, those of one step together.

    Attributes:
        around: what goes to an outlet before and after each text from now on, if text is all that is to be written.
    """

    def __init__(self, streams: list[OutputStream]) -> None:
        self._streams = dict(enumerate(streams))  # of those that go on
        self._fresh = {*self._streams}  # where something may have come
        self._waiter: asyncio.Future[None] | None = None
        self._outlet: Outlet | None = None
        self.around: Sequence[bytes] = ()
        for place, stream in self._streams.items():
            stream.listener = partial(self._listen, place)

    async def next(self, outlet: Outlet | None = None, write: Callable[[Batch], bytes] = lambda batch: b"") -> Batch:
        """What comes next; nothing once all have ended. Raises what a prompt met.

        Args:
            outlet: as long as it is ready, what comes of a single prompt goes there, in the engine's own callback and
                as `write` puts it: to wake a task would cost more than all else that a token needs.
        """
        self._write, self._outlet = write, outlet if len(self._streams) == 1 else None
        while not (batch := self._take()) and self._streams:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return batch

    def _take(self) -> Batch:
        fresh = sorted(self._fresh)
        ready = [place for place in fresh if self._streams[place].is_fresh] or fresh  # one prompt's error ends all
        self._fresh.difference_update(ready)
        batch = [(place, output) for place in ready if (output := self._streams[place].take()) is not None]
        for place, output in batch:
            if output.finished:
                del self._streams[place]
        return batch

    def _listen(self, place: int) -> None:
        if place not in self._streams:
            return  # a reader that was awake already took its end
        self._fresh.add(place)
        if self._waiter is None or self._waiter.done():
            return
        try:
            if self._outlet is not None and self._outlet.is_ready:
                if self.around and (text := self._streams[place].text()) is not None:
                    if text:
                        self._outlet.write(encode(text).join(self.around))
                    return
                if (output := self._streams[place].take()) is not None:
                    self._outlet.write(self._write([(place, output)]))
                if output is None or not output.finished:
                    return
                del self._streams[place]
                self._fresh.clear()
            self._waiter.set_result(None)
        except Exception as error:
            self._waiter.set_exception(error)


class TurnService(Generic[_Body]):
    """Answers the requests of one dialect."""

    def __init__(self, state: ServerState, read: Read[_Body, Writer], outlet: Outlet | None = None) -> None:
        """`outlet`: where a stream's items may go that are not its first."""
        self._state, self._read, self._outlet = state, read, outlet

    async def create(self, body: _Body, request_id: str, client: str | None = None) -> list[bytes]:
        """The whole answer as JSON, which may come in several parts.

        Args:
            client: whose request it is, whatever the body says; None: what that says.

        Raises:
            InvalidRequestError: the request is refused (ModelNotFoundError is one of these).
            OverloadedError, RequestFailedError, EngineDeadError: as `AsyncLLM.generate` does; where one of several
                prompts fails, all end.
        """
        request, writer = await self._read(self._state, body, request_id)
        outputs: dict[int, RequestOutput] = {}
        async with opened(self._state, request, client) as found:
            while batch := await found.next():
                outputs.update(batch)
        if _size(outputs.values(), request.params) <= _MANY:
            return _whole(writer, outputs)
        return await asyncio.to_thread(_whole, writer, outputs)

    async def stream(self, body: _Body, request_id: str, client: str | None = None) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, [DONE] included; what one engine step brings is one item. See `create`."""
        request, writer = await self._read(self._state, body, request_id)
        turn, write, outlet = writer.turn, partial(_written, writer), None if writer.opens_large else self._outlet
        async with opened(self._state, request, client) as outputs:
            while batch := await outputs.next(outlet, write):
                if writer.opens_large and turn.num_begun < turn.num_choices:
                    for part in await asyncio.to_thread(_events_in_parts, writer, batch):
                        yield part
                elif events := write(batch):
                    yield events
                if outlet is not None and turn.num_unfinished:
                    outputs.around = around_text(writer)


@asynccontextmanager
async def opened(state: ServerState, request: TurnRequest, client: str | None) -> AsyncGenerator[Outputs, None]:
    """Have the engine run a request as long as the context lasts.

    Raises:
        InvalidRequestError, OverloadedError, RequestFailedError, EngineDeadError: as `AsyncLLM.generate` does.
    """
    if request.refusal is not None:
        raise request.refusal
    request_id, prompts = request.request_id, request.prompts
    if state.args.enable_log_requests:
        _log(request, state.args.max_log_len)
    adapter, asked = await state.llm.find_adapter(request.lora_request), request.terms
    terms = msgspec.structs.replace(asked, adapter=adapter, client=asked.client if client is None else client)
    ids = [f"{request_id}-{place}" for place in range(len(prompts))] if len(prompts) > 1 else [request_id]
    async with AsyncExitStack() as stack:
        with named(request.names):
            streams: list[OutputStream] = []
            for place, prompt in enumerate(prompts):
                if place % _STARTED_TOGETHER == _STARTED_TOGETHER - 1:
                    await asyncio.sleep(0)
                streams.append(await stack.enter_async_context(state.llm.open(prompt, None, ids[place], terms, None)))
            yield Outputs(streams)


def _log(request: TurnRequest, longest: int | None) -> None:
    """What comes from a client is quoted, so that it can't write lines of its own."""
    params = quoted(repr(request.params), 4000)[1:-1]
    for prompt in request.prompts[:_MOST_LOGGED]:
        ids, text = prompt.token_ids, prompt.text
        most = len(text or "") if longest is None else longest
        shown = f"token ids {ids[:longest]}" if text is None else quoted(text, most)
        logger.info("request %s: %d prompt tokens: %s; %s", quoted(request.request_id), len(ids), shown, params)
    if (num_more := len(request.prompts) - _MOST_LOGGED) > 0:
        logger.info("request %s: %d more prompts", quoted(request.request_id), num_more)


def around_text(writer: Writer) -> Sequence[bytes]:
    """What stands before and after the text in all events to come, as far as they differ in nothing else."""
    if not writer.turn.tells_text:
        return ()
    delta = Delta(0, 0, writer.turn.outputs[0], [TextDelta(_MARK)], [], (), False, None)
    return event(writer.chunk(delta)).rsplit(encode(_MARK), 1)


def _written(writer: Writer, batch: Batch) -> bytes:
    return b"".join(_events(writer, batch))


def _events(writer: Writer, batch: Batch) -> list[bytes]:
    """The events that a batch brings; with the last ones goes the stream's end."""
    turn = writer.turn
    events = [event(writer.chunk(delta)) for place, output in batch for delta in turn.take(place, output)]
    if turn.num_unfinished == 0:
        if writer.ends_with_usage:
            events.append(event(writer.usage_chunk()))
        events.append(DONE)
    return events


def _events_in_parts(writer: Writer, batch: Batch) -> list[bytes]:
    return _joined(_events(writer, batch))


def _whole(writer: Writer, outputs: dict[int, RequestOutput]) -> list[bytes]:
    """The answer's JSON, choice by choice: to encode all at once would hold up the event loop, thread or not."""
    choices: list[bytes] = []
    for place in sorted(outputs):
        for delta in writer.turn.take(place, outputs[place]):
            choices += [b"," if choices else b"", encode(writer.choice(delta))]
    # No text of the answer's can look like this: quotes within one are escaped.
    head, key, tail = encode(writer.answer([], outputs[0])).partition(b'"choices":[')
    return _joined([head, key, *choices, tail])


def _joined(pieces: list[bytes]) -> list[bytes]:
    """Small pieces together, large ones by themselves."""
    starts = accumulate(map(len, pieces), initial=0)
    parts = groupby(zip(starts, pieces, strict=False), key=lambda pair: pair[0] // _PART)
    return [b"".join(piece for _, piece in part) for _, part in parts]


def _size(outputs: Iterable[RequestOutput], params: SamplingParams) -> int:
    """About how many tokens, and alternatives to them, an answer has."""
    each = 1 + (params.logprobs or 0) if params.logprobs != -1 else _MANY
    size = 0
    for output in outputs:
        size += sum(len(part.token_ids) for part in output.outputs) * each
        if output.prompt_logprobs is not None:
            size += sum(len(entry) for entry in output.prompt_logprobs if entry is not None) * len(output.outputs)
    return size
