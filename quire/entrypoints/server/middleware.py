"""What every request passes through, in plain ASGI: API keys, limits, counting, and errors that nobody caught.

`build_app` puts them around the routes, and has only HTTP come to them. None of them looks into a body or a response; a
stream's chunks pass through one extra call.
"""

import base64
import binascii
import hashlib
import hmac
import itertools
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.entrypoints.server.errors import AuthenticationError, error_response, is_anthropic, route_path
from quire.entrypoints.server.prometheus import HttpCounts
from quire.entrypoints.server.state import ServerState
from quire.errors import QuireError
from quire.utils.logs import logger
from quire.utils.values import decimal

# For what watches a server, and has no key, nor needs one of vLLM: load balancers, autoscalers, Prometheus.
PUBLIC_PATHS = ("/health", "/ping", "/load", "/metrics", "/version")
_ENDLESS_PATHS = ("/live",)  # streams that end with the server
# Who asks for the load is none, nor what to wait for; vLLM's counts leave these out, too.
_NO_LOAD = (*_ENDLESS_PATHS, *PUBLIC_PATHS)
_PAGES = ("/", "/docs")
_LONGEST_ID = 200
OUTLET = "quire.outlet"  # in a request's scope, as what follows
_CLIENT = "quire.client"


class Frame:
    """Counts requests, gives them their id, logs a line for each at debug level, and answers uncaught errors."""

    def __init__(self, app: ASGIApp, state: ServerState, counts: HttpCounts) -> None:
        self._app, self._state, self._counts = app, state, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, asked = route_path(scope), scope["path"]  # quoted for the log, or a client could write lines of its own
        # A HEAD request is run as the GET that it asks about, but for streams without an end.
        is_head = scope["method"] == "HEAD" and path not in _ENDLESS_PATHS
        inner = {**scope, "method": "GET"} if is_head else scope
        if self._state.args.middleware:
            scope.pop(OUTLET, None)  # others want to see all that is sent
        args, status, num_sent, start = self._state.args, 0, 0, time.perf_counter()
        headers = [(b"x-request-id", identify(scope).encode("latin-1"))] if args.enable_request_id_headers else []
        if is_anthropic(scope):
            headers.append((b"request-id", identify(scope).encode("latin-1")))
        counted = path not in _NO_LOAD

        async def note_status(message: Message) -> None:
            nonlocal status, num_sent
            if message["type"] == "http.response.start":
                status, num_sent = message["status"], _content_length(message.get("headers", ()))
                message["headers"] = [*message.get("headers", ()), *headers]
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        self._state.num_in_flight += counted
        try:
            await self._app(inner, receive, note_status)
        except ClientDisconnect:  # it left before its whole body was here: nobody reads an answer
            status = 499
        except Exception as error:
            if status:  # too late for an answer: the server closes the connection, and logs why
                raise
            if not isinstance(error, QuireError | HTTPException | RecursionError):
                logger.exception("%s %s failed", scope["method"], quote(asked))
            await error_response(error, scope)(scope, receive, note_status)
        finally:
            self._state.num_in_flight -= counted
            seconds, handler = time.perf_counter() - start, getattr(inner.get("route"), "path", "none")
            if handler not in _NO_LOAD:
                sizes = _content_length(scope["headers"]), num_sent
                self._counts.count(scope["method"], status or 500, handler, sizes, seconds)
            if args.logs_requests and path not in (args.disable_access_log_for_endpoints or "").split(","):
                client, shown = (scope.get("client") or ("-",))[0], quote(asked)
                logger.debug("%s %s from %s: %d in %.3f s", scope["method"], shown, client, status, seconds)


def identify(scope: Scope) -> str:
    """The request's id: its own, if short and printable, or a new one, which whoever asks next finds in its place."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
    if 0 < len(given) <= _LONGEST_ID and given.isprintable():
        return given
    new = uuid.uuid4().hex
    scope["headers"] = [*(h for h in scope["headers"] if h[0] != b"x-request-id"), (b"x-request-id", new.encode())]
    return new


class BaseURLs:
    """Takes requests of clients whose base URL lacks /v1, has two of them, or slashes too many, for what they mean.

    Args:
        routes: paths, of which those below /v1 are found without it where no other begins so.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[str]) -> None:
        self._app = app
        self._versioned, self._plain = set[str](), set[str]()  # first parts of paths below /v1, and of others
        for path in routes:
            parts = path.split("/")[1:]
            self._versioned.add(parts[1]) if parts[0] == "v1" else self._plain.add(parts[0])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (found := route_path(scope)).startswith("/"):
            given = found.strip("/").split("/")
            own = [*itertools.dropwhile(lambda part: part in ("", "v1"), given)]
            if own and own[0] in self._versioned | self._plain:
                is_versioned = own[0] in self._versioned and ("v1" in given or own[0] not in self._plain)
                path = "/".join(["", "v1", *own] if is_versioned else ["", *own])
                scope["path"] = scope.get("root_path", "") + path  # in place: `Frame` learns the route from it
        await self._app(scope, receive, send)


class ApiKeys:
    """Refuses every request without a valid key, but for `PUBLIC_PATHS`: unknown routes and the docs too."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app, self._digests = app, [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if route_path(scope) not in PUBLIC_PATHS:
            if (digest := self._valid_key(scope["headers"])) is None:
                # A browser asks a person for the key (as the password) only if the page itself is refused this way.
                raise AuthenticationError('Basic realm="Quire"' if route_path(scope) in _PAGES else "Bearer")
            scope[_CLIENT] = f"key {digest.hex()[:16]}"
        await self._app(scope, receive, send)

    def _valid_key(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
        """The digest of the key that a request brings, if it is one of ours."""
        pairs = itertools.product(map(_digest, _keys_given(headers)), self._digests)
        found = [own for given, own in pairs if hmac.compare_digest(given, own)]  # all, always: the time tells nothing
        return found[-1] if found else None


def _keys_given(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    for name, value in headers:
        if name == b"x-api-key":
            yield value
        elif name == b"authorization":
            scheme, _, rest = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                yield rest.strip()
            elif scheme.lower() == b"basic":
                with suppress(binascii.Error):
                    yield base64.b64decode(rest.strip(), validate=True).partition(b":")[2]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def client_of(scope: Scope) -> str | None:
    """Whose request it is by its API key, which the name does not tell; None where no keys are asked for."""
    return scope.get(_CLIENT)


def outlet_of(scope: Scope) -> Any:
    """The `Outlet` of the request's answer, where its connection has one that nobody needs to listen at."""
    return scope.get(OUTLET)


class RequestLimits:
    """Refuses too many headers (431), and bodies too large by their announced length or once they get there (413)."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, max_headers: int) -> None:
        self._app, self._max_body_bytes, self._max_headers = app, max_body_bytes, max_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(scope["headers"]) > self._max_headers:
            raise HTTPException(431, f"the request has more than {self._max_headers} headers.")
        self._check(_content_length(scope["headers"]))
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            self._check(num_bytes)
            return message

        await self._app(scope, counted, send)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_body_bytes:
            raise HTTPException(413, f"the body is larger than {self._max_body_bytes} bytes, the most taken here.")


def _content_length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """What they say of a body's length; 0: nothing that is one."""
    given = [decimal(value.decode("latin-1")) or 0 for name, value in headers if name == b"content-length"]
    return max(given, default=0)
