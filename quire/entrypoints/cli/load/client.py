"""A small HTTP/1.1 client: answers are parsed as their bytes arrive, without a task switch per chunk.

`quire bench serve` shares the machine with the server it measures, so a streamed chunk may cost a few microseconds
only. One request at a time on a connection; connections are kept and used again. Must not know what is asked.
"""

import asyncio
import ssl
from collections.abc import Callable, Generator, Mapping
from typing import TypeVar

from quire.entrypoints.cli.remote import CONNECT_SECONDS, Address, authority

Sink = Callable[[bytes], None]  # is given the pieces of a body
_Part = TypeVar("_Part")
Parser = Generator[None, None, _Part]  # it is resumed whenever more bytes have come


class BrokenConnectionError(ConnectionError):
    """The connection closed, or what came is not HTTP, before the answer was complete."""


class Client:
    """Sends requests to one server, each on a connection that has none under way."""

    def __init__(self, address: Address, headers: Mapping[str, str]) -> None:
        self._address = address
        self._ssl = ssl.create_default_context() if address.encrypted else None
        headers = {"Host": authority(address.host, address.port), **headers}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: bytes, sink: Sink) -> tuple[int, bytes]:
        """The status of the answer and its body; a body of status 200 goes to `sink` as it comes instead.

        Cancelling it closes the connection.

        Raises:
            OSError: no connection, or it broke (BrokenConnectionError).
        """
        head = f"POST {path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        while True:
            reused = bool(self._idle)
            connection = self._idle.pop() if reused else await self._connect()
            try:
                return await connection.exchange(head.encode() + body, sink)
            except BrokenConnectionError:
                # The server may close an idle connection at the moment that it is used again: no fault of either.
                if not reused or connection.answered:
                    raise
            finally:
                if connection.reusable:
                    self._idle.append(connection)
                else:
                    connection.close()

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _connect(self) -> "_Connection":
        loop, host, port = asyncio.get_running_loop(), self._address.host, self._address.port
        async with asyncio.timeout(CONNECT_SECONDS):
            name = host if self._ssl is not None else None
            return (await loop.create_connection(_Connection, host, port, ssl=self._ssl, server_hostname=name))[1]


class _Connection(asyncio.Protocol):
    """One connection, and the parser of the answer under way on it."""

    def __init__(self) -> None:
        self.reusable = False
        self.answered = False  # a byte of the answer has come
        self._received = bytearray()  # and not yet parsed
        self._done: asyncio.Future[tuple[int, bytes]] | None = None

    async def exchange(self, request: bytes, sink: Sink) -> tuple[int, bytes]:
        """Send a request and wait for the whole answer."""
        self.reusable = self.answered = False
        if self._transport.is_closing():
            raise BrokenConnectionError("the server closed the connection")
        self._done = asyncio.get_running_loop().create_future()
        self._parser = self._parse(sink)
        next(self._parser)
        self._transport.write(request)
        return await self._done

    def close(self) -> None:
        """Close at once; the server sees its client go away."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            return self.close()  # nobody asked
        self.answered = True
        self._received += data
        try:
            next(self._parser)
        except StopIteration as end:
            self._done.set_result(end.value)
        except (ValueError, LookupError):
            self._done.set_exception(BrokenConnectionError("the server's answer is not HTTP/1.1"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            error = BrokenConnectionError("the server closed the connection before the answer was complete")
            self._done.set_exception(error)

    def _parse(self, sink: Sink) -> Parser[tuple[int, bytes]]:
        """The status, and the body if it does not go to `sink`."""
        version, status = (yield from self._line()).split(b" ")[:2]
        fields: dict[bytes, bytes] = {}
        while line := (yield from self._line()):
            name, _, value = line.partition(b":")
            fields[name.lower()] = value.strip().lower()
        body = bytearray()
        emit = sink if int(status) == 200 else body.extend
        if fields.get(b"transfer-encoding") == b"chunked":
            while size := int((yield from self._line()).partition(b";")[0], 16):
                emit((yield from self._take(size + 2))[:-2])
            yield from self._line()
        else:
            emit((yield from self._take(int(fields[b"content-length"]))))
        self.reusable = version == b"HTTP/1.1" and fields.get(b"connection") != b"close" and not self._received
        return int(status), bytes(body)

    def _line(self) -> Parser[bytes]:
        while (end := self._received.find(b"\r\n")) < 0:
            yield
        return (yield from self._take(end + 2))[:-2]

    def _take(self, size: int) -> Parser[bytes]:
        while len(self._received) < size:
            yield
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken
