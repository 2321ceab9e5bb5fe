"""How answers are sent: one send a step, nothing before the first event, and an end when the client leaves."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from quire.entrypoints.server.chat_request import ChatCompletionRequest
from quire.entrypoints.server.completion_request import CompletionRequest
from quire.entrypoints.server.dialects.completions import read_completion
from quire.entrypoints.server.responses import ChatChunk, CompletionResponse
from quire.entrypoints.server.service import TurnService
from quire.entrypoints.server.sse import EventStream, event, while_connected
from quire.errors import InvalidRequestError, RequestFailedError

Message = dict[str, Any]


class Wire:
    """A client's end of an ASGI connection."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.gone = asyncio.Event()
        self.num_wanted = 10**9  # messages after which the client leaves

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(dict(message))
        if len(self.sent) >= self.num_wanted:
            self.gone.set()
        await asyncio.sleep(0)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


class Source:
    """A service's stream of three events; notes how it ended."""

    def __init__(self, failure: Exception | None = None, first: bool = False) -> None:
        self.failure, self.first, self.closed = failure, first, False

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            if self.first and self.failure is not None:
                raise self.failure
            for number in range(3):
                await asyncio.sleep(0)
                yield b"data: %d\n\n" % number
            if self.failure is not None:
                raise self.failure
        finally:
            self.closed = True


def run(stream: EventStream, wire: Wire) -> None:
    asyncio.run(stream({"type": "http"}, wire.receive, wire.send))


def test_a_stream() -> None:
    wire, source = Wire(), Source()
    run(EventStream(source.events()), wire)
    start, *body = wire.sent
    assert (start["type"], start["status"]) == ("http.response.start", 200)
    assert dict(start["headers"]) == {
        b"content-type": b"text/event-stream; charset=utf-8",
        b"cache-control": b"no-cache",
        b"x-accel-buffering": b"no",
    }
    assert [message["body"] for message in body] == [b"data: 0\n\n", b"data: 1\n\n", b"data: 2\n\n", b""]
    assert [message.get("more_body", False) for message in body] == [True, True, True, False]


def test_a_refusal_leaves_before_anything_is_sent() -> None:
    wire, source = Wire(), Source(InvalidRequestError("no.", "n"), first=True)
    with pytest.raises(InvalidRequestError):
        run(EventStream(source.events()), wire)
    assert wire.sent == []


@pytest.mark.parametrize(
    ("failure", "message"),
    [(RequestFailedError("it failed."), "it failed."), (KeyError("secret"), "internal error")],
)
def test_a_failure_is_an_event(failure: Exception, message: str, caplog: pytest.LogCaptureFixture) -> None:
    wire = Wire()
    run(EventStream(Source(failure).events()), wire)
    assert wire.sent[-1] == {"type": "http.response.body", "body": b""}
    assert b"data: 2\n\n" in wire.body
    assert wire.body.endswith(b"\n\ndata: [DONE]\n\n")
    assert message.encode() in wire.body
    assert b"secret" not in wire.body
    assert ("secret" in caplog.text) == isinstance(failure, KeyError), "what nobody expected is in the log"


@pytest.mark.parametrize("num_wanted", [1, 2, 3])
def test_a_client_that_leaves_ends_the_stream(num_wanted: int) -> None:
    wire, source = Wire(), Source()
    wire.num_wanted = num_wanted
    run(EventStream(source.events()), wire)
    assert source.closed
    assert len(wire.sent) <= num_wanted + 1


def test_a_client_that_reads_nothing_is_noticed_to_leave() -> None:
    async def talk() -> None:
        wire, source = Wire(), Source()

        async def stuck(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        stream = EventStream(source.events())
        task = asyncio.create_task(stream({"type": "http"}, wire.receive, stuck))
        await asyncio.sleep(0.01)
        assert not task.done()
        wire.gone.set()
        await asyncio.wait_for(task, 5)
        assert source.closed

    asyncio.run(talk())


def test_work_is_cancelled_with_its_caller() -> None:
    async def talk() -> None:
        wire, cancelled = Wire(), asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        task = asyncio.create_task(while_connected(wire.receive, work()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert cancelled.is_set()

    asyncio.run(talk())


def test_results_and_errors_pass_through() -> None:
    async def result() -> int:
        return 5

    async def error() -> int:
        raise InvalidRequestError("no.")

    async def timeout() -> int:
        raise TimeoutError

    wire = Wire()
    assert asyncio.run(while_connected(wire.receive, result())) == 5
    with pytest.raises(InvalidRequestError):
        asyncio.run(while_connected(wire.receive, error()))
    with pytest.raises(TimeoutError):
        asyncio.run(while_connected(wire.receive, timeout()))


def test_a_connection_that_breaks_is_a_client_that_left() -> None:
    async def receive() -> Message:
        raise ConnectionError

    async def work() -> None:
        await asyncio.Event().wait()

    assert asyncio.run(while_connected(receive, work())) is None


# --- with the engine


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("num_prompts", [1, 3])
@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_leaves_aborts_its_requests(server: Any, streams: bool, num_prompts: int, begun: bool) -> None:
    """Before the first token, and in the middle."""
    body = CompletionRequest.model_validate({"prompt": [[5]] * num_prompts, "max_tokens": 100, "stream": streams})

    async def talk() -> None:
        server.core.held = not begun
        server.core.texts = ["word " * 80]
        wire = Wire()
        answer: Awaitable[Any]
        if streams:
            answer = EventStream(server.completions.stream(body, "r"))({"type": "http"}, wire.receive, wire.send)
        else:
            answer = while_connected(wire.receive, server.completions.create(body, "r"))
        task = asyncio.ensure_future(answer)
        await _until(
            lambda: len(server.core.requests) == num_prompts and (not begun or not server.llm._admission.queued)
        )
        wire.gone.set()
        assert await task is None
        assert sorted(server.core.aborted) == sorted(r.request_id for r in server.core.requests)
        assert server.llm.num_unfinished == 0
        assert not wire.body.endswith(b"[DONE]\n\n")

    asyncio.run(talk())


def test_one_send_for_each_step(server: Any) -> None:
    """All choices of all prompts that a step brings travel together."""
    body = CompletionRequest.model_validate({"prompt": [[5], [6]], "n": 4, "max_tokens": 6, "stream": True})

    async def talk() -> Wire:
        wire = Wire()
        await EventStream(server.completions.stream(body, "r"))({"type": "http"}, wire.receive, wire.send)
        return wire

    wire = asyncio.run(talk())
    assert wire.body.count(b"data: {") >= 8 * 3
    assert len(wire.sent) <= 2 + 2 * 7, "a send for each step of each prompt at most"


class Shortcut:
    """An `Outlet` into a wire, which is ready now and then."""

    def __init__(self, wire: Wire, ready: list[bool]) -> None:
        self._wire, self._ready = wire, ready
        self.num_written = 0

    @property
    def is_ready(self) -> bool:
        return len(self._wire.sent) >= 2 and self._ready[len(self._wire.sent) % len(self._ready)]

    def write(self, data: bytes) -> None:
        self.num_written += 1
        self._wire.sent.append({"body": data})


def sent_past(server: Any, ready: list[bool], **fields: Any) -> tuple[Wire, Shortcut]:
    """What a stream with an outlet sends."""
    wire = Wire()
    outlet = Shortcut(wire, ready)
    body = CompletionRequest.model_validate({"prompt": [5], "max_tokens": 9, "stream": True, **fields})

    async def talk() -> None:
        service = TurnService(server.state, read_completion, outlet)
        await EventStream(service.stream(body, "r"))({"type": "http"}, wire.receive, wire.send)

    asyncio.run(talk())
    return wire, outlet


@pytest.mark.parametrize("ready", [[True], [True, False], [True, True, False], [False]])
@pytest.mark.parametrize("n", [1, 2])
def test_the_middle_of_a_stream_goes_past_the_application(server: Any, ready: list[bool], n: int) -> None:
    """Whatever goes which way, the body is the same, usage and all, and only its middle takes the shortcut."""
    texts = []
    for outlets in ([False], ready):
        wire, outlet = sent_past(server, outlets, n=n, stream_options={"include_usage": True})
        assert outlet.num_written <= len(wire.sent) - 3, "headers, the first piece and the end are the application's"
        assert wire.body.endswith(b"[DONE]\n\n")
        assert wire.body.count(b"[DONE]") == 1
        texts.append([*texts_of(wire.body), wire.body.partition(b'"usage":{')[2]])
    assert texts[0] == texts[1]
    assert (outlet.num_written > 3) == (True in ready)


def test_what_a_stream_meets_past_the_application_is_its_last_event(server: Any) -> None:
    server.core.ending, server.core.ends_at = "abort", 4
    wire, outlet = sent_past(server, [True])
    assert outlet.num_written == 3
    assert b"the server stops or sleeps" in wire.body
    assert wire.body.endswith(b"[DONE]\n\n")


@pytest.mark.parametrize("usage", [None, {"include_usage": True}])
@pytest.mark.parametrize("text", ['A "quoted" \\ line\n', "\0 and 🙂 é"])
def test_events_that_differ_in_their_text_alone_are_written_like_all_others(server: Any, text: str, usage: Any) -> None:
    """Byte for byte, in completions and in chat, whatever needs escapes, and stands elsewhere in the event."""
    server.state.model_names[0] = model = 'the "\\u0000" of \0'
    server.core.texts = [text]
    fields = {"model": model, "max_tokens": 40, "stream": True, "stream_options": usage}
    completion = CompletionRequest.model_validate({"prompt": [5], **fields})
    chat = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}], **fields})

    async def items(stream: AsyncGenerator[bytes, None]) -> bytes:
        return b"".join([item async for item in stream])

    streams: list[tuple[AsyncGenerator[bytes, None], Any]] = [
        (server.completions.stream(completion, "r"), CompletionResponse),
        (server.chat.stream(chat, "r"), ChatChunk),
    ]
    for stream, kind in streams:
        *events, done, rest = asyncio.run(items(stream)).split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        chunks = [msgspec.json.decode(data.removeprefix(b"data: "), type=kind) for data in events]
        assert [event(chunk) for chunk in chunks] == [data + b"\n\n" for data in events]
        assert {chunk.model for chunk in chunks} == {model}
        choices = [choice for chunk in chunks for choice in chunk.choices]
        assert len(choices) > 3
        assert "".join(c.text if kind is CompletionResponse else c.delta.content or "" for c in choices) == text


def test_several_prompts_do_without_a_shortcut(server: Any) -> None:
    wire, outlet = sent_past(server, [True], prompt=[[5], [6]])
    assert outlet.num_written == 0
    assert wire.body.endswith(b"[DONE]\n\n")


def texts_of(body: bytes) -> list[str]:
    """Of each choice, and how it ended."""
    texts = ["", ""]
    for line in body.splitlines():
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] += choice["text"] + (choice["finish_reason"] or "")
    return texts
