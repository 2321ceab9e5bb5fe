"""One client's connection: uvicorn's HTTP/1.1 protocol, with deadlines for what a client sends.

uvicorn itself waits for ever for headers and bodies that never end. `launch` gives the class, with the options, to
uvicorn; nobody else knows it.
"""

import asyncio
import re
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from quire.entrypoints.server.errors import ErrorInfo, error_body
from quire.entrypoints.server.middleware import OUTLET
from quire.entrypoints.server.options import ServerArgs

_EVENTS_AT_ONCE = 64  # of one client, for which all others wait: a body may come in chunks of a byte


class Connection(H11Protocol):
    """Is closed when a request's headers or its body take too long, from their first byte to their last.

    Before the first request, the time for the headers starts with the connection; between two requests, it is
    uvicorn's keep-alive timeout that counts. What comes in very small pieces is handled a few pieces at a time.
    """

    def __init__(self, options: ServerArgs, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timeouts = {"headers": options.timeout_headers, "body": options.timeout_body}
        self._awaited: str | None = None  # "headers" or "body": what has begun to come
        self._deadline: asyncio.TimerHandle | None = None
        self._num_events, self._next_event = 0, self.conn.next_event
        self.conn.next_event = self._next_in_turn  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await("headers")

    def handle_events(self) -> None:
        before, self._num_events = self.cycle, 0
        super().handle_events()
        self._note_progress()
        if self.cycle is not before:  # the application starts after this
            # Proxies may ask by the whole URL (RFC 9112, 3.2.2).
            self.scope["path"] = re.sub("(?i)^https?://[^/]*", "", self.scope["path"]) or "/"
            # What came by HTTP/1.1 is answered in chunks, where no length is said.
            if self.scope["http_version"] == "1.1" and self.scope["method"] == "POST":
                self.cycle.scope[OUTLET] = ChunkOutlet(self.cycle)  # type: ignore[typeddict-unknown-key]

    def connection_lost(self, exc: Exception | None) -> None:
        self._await(None)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close when idle, else after the answer that is under way."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP. Where an answer has begun, or ended, the fault is in that request's body: close."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        body = error_body(ErrorInfo(400, "this is not a valid HTTP request.", "invalid_request_error"))
        headers = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + headers.encode() + body)
        self.transport.close()

    def _next_in_turn(self) -> Any:
        """h11's next event; none for now where others have waited long enough."""
        self._num_events += 1
        if self._num_events <= _EVENTS_AT_ONCE:
            return self._next_event()
        self.transport.pause_reading()
        self.loop.call_soon(self._go_on)
        return h11.NEED_DATA

    def _go_on(self) -> None:
        if not self.flow.read_paused:
            self.transport.resume_reading()
        if not self.transport.is_closing():
            self.handle_events()

    def _note_progress(self) -> None:
        state = self.conn.their_state
        begins = state is h11.IDLE and self.conn.trailing_data[0]
        self._await("body" if state is h11.SEND_BODY else "headers" if begins else None)

    def _await(self, what: str | None) -> None:
        """Start the time for something new; what goes on keeps its deadline."""
        if what == self._awaited:
            return
        self._awaited = what
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if what is None else self.loop.call_later(self._timeouts[what], self.transport.abort)


class ChunkOutlet:
    """Where more of an answer's body goes that has no length (an `Outlet`)."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_ready(self) -> bool:
        cycle = self._cycle
        return cycle.response_started and not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete)

    def write(self, data: bytes) -> None:
        """Send a chunk, as h11 would, which goes through all that may follow on what each time."""
        if data:  # an empty one would be the last
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
