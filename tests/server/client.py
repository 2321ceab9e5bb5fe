"""A raw HTTP client for the tests of load and faults, and what a server's engine and processes look like meanwhile.

The client is asyncio over plain sockets, so that a test decides when bytes are read and how a connection ends. It
trusts the server's HTTP to be well formed: where it is not, the test fails anyhow.
"""

import asyncio
import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Address = int | Path  # a port of 127.0.0.1, or a Unix socket
_Result = TypeVar("_Result")


def run(work: Coroutine[Any, Any, _Result], seconds: float) -> _Result:
    """Run a test's coroutine; it fails when it takes longer."""

    async def bounded() -> _Result:
        async with asyncio.timeout(seconds):
            return await work

    return asyncio.run(bounded())


@dataclass(frozen=True)
class Answer:
    """A whole HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """One HTTP/1.1 connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, address: Address, receive_buffer: int | None = None) -> "Connection":
        """Connect; `receive_buffer` bounds what is taken in for a reader that is slow."""
        unix = isinstance(address, Path)
        sock = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
        sock.setblocking(False)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            await asyncio.get_running_loop().sock_connect(sock, str(address) if unix else ("127.0.0.1", address))
            return cls(*await asyncio.open_connection(sock=sock, limit=receive_buffer or 2**20))
        except BaseException:
            sock.close()
            raise

    def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> None:
        self.writer.write(http(method, path, body, headers))

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the answer."""
        first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip().split("\r\n")
        pairs = (line.partition(":") for line in lines)
        return int(first.split(" ", 2)[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}

    async def chunks(self, headers: dict[str, str]) -> AsyncGenerator[bytes, None]:
        """The body as it comes."""
        if headers.get("transfer-encoding") != "chunked":
            yield await self.reader.readexactly(int(headers.get("content-length", 0)))
            return
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)

    async def answer(self) -> Answer:
        """The whole answer."""
        status, headers = await self.head()
        return Answer(status, headers, b"".join([chunk async for chunk in self.chunks(headers)]))

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        """End the connection with a TCP reset, as a client that crashes does."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


def http(method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> bytes:
    """The bytes of a request; `body` is sent as JSON unless it is bytes."""
    content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"Host": "test", "Content-Type": "application/json", "Content-Length": len(content), **(headers or {})}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + content


async def ask(
    address: Address, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> Answer:
    """One request on a connection of its own; leaving early (a timeout, say) closes the connection."""
    connection = await Connection.open(address)
    with contextlib.closing(connection):
        connection.send(method, path, body, headers)
        return await connection.answer()


def events(body: bytes) -> list[Any]:
    """The data of server-sent events; [DONE] as a text."""
    parts = [part.removeprefix(b"data: ") for part in body.split(b"\n\n") if part]
    return ["[DONE]" if part == b"[DONE]" else json.loads(part) for part in parts]


def error_at_the_end(body: bytes) -> Any:
    """The error of a stream that was cut, which tells so and then ends in order."""
    *_, failure, done = events(body)
    assert done == "[DONE]", done
    assert set(failure) == {"error"}, failure
    return failure["error"]


@dataclass(frozen=True)
class EngineState:
    """What the engine holds."""

    num_sequences: int
    num_used_blocks: int


async def engine_state(address: Address) -> EngineState:
    """By a snapshot of its own, which /live brings, and not by what its last step has told."""
    connection = await Connection.open(address)
    with contextlib.closing(connection):
        connection.send("GET", "/live")
        _, headers = await connection.head()
        received = b""
        async for chunk in connection.chunks(headers):
            received += chunk
            for event in received.split(b"\n\n")[:-1]:
                name, _, data = event.partition(b"\n")
                if name == b"event: snapshot":
                    snapshot = json.loads(data.removeprefix(b"data: "))
                    return EngineState(snapshot["num_sequences"], snapshot["blocks"]["num_used"])
    raise AssertionError("/live ended without a snapshot")


async def until_idle(address: Address, seconds: float = 10.0) -> float:
    """Wait until the engine holds no request and no block; returns how long that took."""
    start = time.monotonic()
    while (state := await engine_state(address)) != EngineState(0, 0):
        assert time.monotonic() - start < seconds, f"after {seconds:g} s the engine still holds {state}"
        await asyncio.sleep(0.02)
    return time.monotonic() - start


@dataclass(frozen=True)
class Footprint:
    """What processes take of the system, all together."""

    resident_bytes: int
    num_files: int
    num_threads: int

    @classmethod
    def of(cls, pids: list[int]) -> "Footprint":
        pages = threads = files = 0
        for pid in pids:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                threads += len(os.listdir(f"/proc/{pid}/task"))
                files += len(os.listdir(f"/proc/{pid}/fd"))
        return cls(pages * os.sysconf("SC_PAGESIZE"), files, threads)
