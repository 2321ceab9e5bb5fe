"""A server behind a command: any OpenAI-compatible one, asked for one thing at a time. Slow to import.

`quire chat` and `quire complete` talk with it; `quire bench serve` asks it for facts, and sends its load by a client
of its own.
"""

import json
import os
from argparse import Namespace
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

import msgspec

from quire.entrypoints.cli.load.events import Event, EventReader, error_words
from quire.errors import ConfigError, InvalidRequestError, QuireError

CONNECT_SECONDS = 30.0


class RemoteError(QuireError, RuntimeError):
    """The server can't be reached, or could not do what it was asked."""


@dataclass(frozen=True)
class Address:
    """Where a server listens, and the path that its API's paths follow (no slash at its end)."""

    host: str
    port: int
    path: str = "/v1"
    encrypted: bool = False

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Read `http://HOST:PORT/PATH`, the same with https, or `HOST:PORT`; a ConfigError is for anything else."""
        with suppress(ValueError):
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port or (443 if parts.scheme == "https" else 80)
            if parts.scheme in ("http", "https") and parts.hostname:
                return cls(parts.hostname, port, parts.path.rstrip("/") or "/v1", parts.scheme == "https")
        raise ConfigError(f"{url!r} is no server's address: write http://HOST:PORT/v1.")


def authority(host: str, port: int) -> str:
    """HOST:PORT as a URL has it (RFC 3986): an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Model(msgspec.Struct):
    """One of the server's models; only some servers tell of the longest context."""

    id: str
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[Model]


class Server:
    """A server, and the model that it is asked for: its first one where none is named."""

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None) -> None:
        self._url = url
        self.address = Address.parse(url)
        # Without the end of a line, which a file of variables may bring.
        key = (api_key or os.environ.get("QUIRE_API_KEY") or os.environ.get("OPENAI_API_KEY") or "").strip()
        if not (key.isascii() and key.isprintable()):
            raise ConfigError("the API key holds what no header may: characters beyond ASCII, or the end of a line.")
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self.model = model or self.models()[0].id

    @classmethod
    def of_flags(cls, namespace: Namespace) -> "Server":
        """The server that the flags name."""
        given = vars(namespace)
        return cls(given.get("url", "http://localhost:8000/v1"), given.get("api_key"), given.get("model_name"))

    def models(self) -> list[Model]:
        """The server's models; where it lists none, that is a RemoteError."""
        with suppress(msgspec.DecodeError):
            if models := msgspec.json.decode(self.get(f"{self.address.path}/models"), type=_ModelList).data:
                return models
        raise RemoteError(f"the server at {self._url} lists no model; name one.")

    def get(self, path: str) -> bytes:
        """The body of what is at a path; else as `texts`."""
        with self._answer("GET", path) as response:
            return response.read()

    def texts(self, path: str, body: dict[str, Any]) -> Generator[str, None, None]:
        """The text of `events`, as it comes."""
        with closing(self.events(path, body)) as events:
            for event in events:
                yield from (choice.piece for choice in event.choices or () if choice.piece)

    def events(self, path: str, body: dict[str, Any]) -> Generator[Event, None, None]:
        """Post `body` and yield the answer's events; closing the iterator before its end aborts the request.

        Raises:
            InvalidRequestError: the server refuses the request.
            RemoteError: it can't be reached, or failed.
        """
        # Half a character of a command line is escaped: the server says what is wrong with it.
        content = json.dumps({"model": self.model, **body, "stream": True}).encode()
        reader = EventReader()
        try:
            with self._answer("POST", self.address.path + path, content) as response:
                while data := response.read1():
                    yield from reader.feed(data)
        except RemoteError:
            if not reader.ended and reader.failure is None:  # else the connection broke after the last word
                raise
        if reader.failure is not None:
            raise RemoteError(reader.failure[1])
        if not reader.ended:
            raise RemoteError("the server ended its answer in the middle.")

    @contextmanager
    def _answer(self, method: str, path: str, body: bytes | None = None) -> Iterator[HTTPResponse]:
        """The server's answer, good as far as its status goes."""
        kind = HTTPSConnection if self.address.encrypted else HTTPConnection
        try:
            connection = kind(self.address.host, self.address.port, timeout=CONNECT_SECONDS)
            connection.connect()
            connection.sock.settimeout(None)  # an answer takes as long as it takes
        except OSError as error:
            remedy = "`quire serve` starts one, `quire chat demo` and `quire generate demo` need none"
            raise RemoteError(f"no server answers at {self._url} ({error.strerror or error}): {remedy}.") from None
        try:
            connection.request(method, path, body, self.headers)
            if (response := connection.getresponse()).status != 200:
                message = error_words(response.read())[0]
                if response.status == 400:
                    raise InvalidRequestError(message)
                wants = "wants another key (--api-key)" if response.status == 401 else f"answers {response.status}"
                raise RemoteError(f"the server at {self._url} {wants}: {message}")
            yield response
        except (OSError, HTTPException):
            raise RemoteError("the server closed the connection before the answer was complete.") from None
        finally:
            connection.close()
