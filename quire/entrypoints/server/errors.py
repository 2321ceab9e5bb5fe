"""Every exception as an error of OpenAI's form: `{"error": {"message", "type", "param", "code"}}` and a status.

The exception handlers of the app use it, and so do streams for a failure in their middle. What is shown is the text of
typed errors only; anything else is "internal error" to the client, and a stack trace in the log.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from quire import errors
from quire.utils.logs import logger

ANTHROPIC = "/v1/messages"  # what Anthropic's routes begin with
_LONGEST_MESSAGE = 1000  # characters; a message may quote what the client sent
_LONGEST_QUOTE = 80
# What the framework's errors have for a code, what all have for Anthropic's type, and how the routes describe them.
STATUSES = {
    400: ("", "", "The request is not valid."),
    401: ("invalid_api_key", "authentication_error", "No API key, or a wrong one."),
    403: ("api_key_required", "permission_error", "The server has no API key, and so nobody who may do this."),
    404: ("not_found", "not_found_error", "There is no such model, or nothing of this id."),
    405: ("method_not_allowed", "", ""),
    409: ("conflict", "", ""),
    413: ("body_too_large", "request_too_large", "The body is too large."),
    415: ("unsupported_media_type", "", "The body is not sent as JSON."),
    431: ("", "", "Too many headers."),
    500: ("", "", "The engine failed."),
    503: ("unavailable", "", "Too many requests are queued; Retry-After says when to try again."),
    529: ("", "", "The same, as Anthropic says it."),
}


class ModelNotFoundError(errors.InvalidRequestError):
    """The request names a model that this server does not serve."""

    def __init__(self, name: str, served: Sequence[str]) -> None:
        message = f"the model {quote(name)} does not exist; this server has {', '.join(map(repr, served))}."
        super().__init__(message, "model", "model_not_found")


class AuthenticationError(HTTPException):
    """No API key, or a wrong one."""

    def __init__(self, challenge: str) -> None:
        message = "a valid API key is required: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
        super().__init__(401, message, {"WWW-Authenticate": challenge})


@dataclass(frozen=True)
class ErrorInfo:
    """What a client is told about an error."""

    status: int
    message: str
    type: str  # invalid_request_error, authentication_error, server_error
    param: str | None = None  # the request's field at fault
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)


def describe(error: Exception) -> ErrorInfo:
    """The status and the text for an exception."""
    match error:
        case errors.InvalidRequestError():
            return _info(404 if error.code in _NOT_FOUND else 400, error, error.code, error.param)
        case errors.NotYetSupportedError():
            return _info(400, error, "not_supported")
        case RequestValidationError() | ValidationError():
            return _validation(error.errors())
        case HTTPException():
            return _http(error)
        case errors.OverloadedError():
            return _info(503, error, "overloaded", headers={"Retry-After": str(error.retry_after)})
        case errors.EngineStoppedError():
            return _info(503, error, "stopping", headers={"Retry-After": "1"})
        case errors.EngineDeadError():
            return _info(500, error, "engine_dead")
        case errors.RequestFailedError():
            return _info(500, error, "request_failed")
        case RecursionError():  # the body could be read, but not what it says be worked with
            return _info(400, "the body's JSON is nested too deeply.", None)
        case _:
            return _info(500, "internal error; the server's log has the details.", None)


def describe_end(error: Exception) -> ErrorInfo:
    """What is told of a stream, or a batch's request, that failed; the log has what nobody expected."""
    info = describe(error)
    if info.status == 500 and info.code is None:
        logger.exception("a request failed", exc_info=error)
    return info


_NOT_FOUND = ("model_not_found", "not_found", "previous_response_not_found")


def error_body(info: ErrorInfo) -> bytes:
    """The JSON of an error."""
    return msgspec.json.encode({"error": {name: getattr(info, name) for name in ("message", "type", "param", "code")}})


def error_response(error: Exception, scope: Scope) -> Response:
    """The response for an exception, in the form of the API that was asked."""
    info = describe(error)
    content, status = error_body(info), info.status
    if is_anthropic(scope):
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        content = msgspec.json.encode(anthropic_error(info) | {"request_id": given.decode("latin-1")})
        status = 529 if info.code == "overloaded" else info.status
    elif is_ollama(route_path(scope)):
        content = msgspec.json.encode({"error": info.message})
    return Response(content, status, info.headers, media_type="application/json")


def route_path(scope: Scope) -> str:
    """The path that routes are matched against: without the part that a proxy adds, or a slash at its end, as some ask
    for /metrics; never taken from a header.
    """
    return scope["path"].removeprefix(scope.get("root_path", "")).removesuffix("/") or "/"


def is_anthropic(scope: Scope) -> bool:
    """Whether a request is for Anthropic's API."""
    return route_path(scope).startswith(ANTHROPIC)


def is_ollama(path: str) -> bool:
    """Whether a path is of Ollama's API, and not of OpenAI's below another base."""
    return path.startswith("/api/") and not path.startswith("/api/v1")


def anthropic_error(info: ErrorInfo) -> dict[str, Any]:
    """An error in Anthropic's form."""
    kind = "api_error" if info.status >= 500 else "invalid_request_error"
    kind = "overloaded_error" if info.code == "overloaded" else STATUSES.get(info.status, ("", kind))[1] or kind
    return {"type": "error", "error": {"type": kind, "message": info.message}}


def _info(
    status: int, told: object, code: str | None, param: str | None = None, headers: Mapping[str, str] | None = None
) -> ErrorInfo:
    kind = "server_error" if status >= 500 else "authentication_error" if status == 401 else "invalid_request_error"
    return ErrorInfo(status, _cut(str(told)), kind, param, code, dict(headers or {}))


def _http(error: HTTPException) -> ErrorInfo:
    """Errors of the framework: unknown routes and methods, and what the middleware refuses."""
    message = str(error.detail)
    if message == HTTPStatus(error.status_code).phrase:  # nobody gave a text
        message = _PLAIN_TEXTS.get(error.status_code, message)
    return _info(error.status_code, message, STATUSES.get(error.status_code, ("",))[0] or None, headers=error.headers)


_PLAIN_TEXTS = {
    404: "there is no such route; /docs lists those there are.",
    405: "this route does not take this method; the Allow header names those it takes.",
}


def _validation(faults: Sequence[Any]) -> ErrorInfo:
    """The first field at fault, with all that its type could have been; or what is in it, where only that is wrong."""
    places = [_place(error["loc"]) for error in faults]
    within = (f"{places[0]}[", f"{places[0]}.")
    place = next((at for at in places if at is not None and at.startswith(within)), places[0])
    found = [error for error, at in zip(faults, places, strict=True) if at == place]
    message = "; or ".join(dict.fromkeys(error["msg"].removeprefix("Value error, ") for error in found[:3]))
    value, kind = found[0].get("input"), found[0]["type"]
    if not isinstance(value, dict | list):
        message += f" (it is {quote(value)})" if kind != "missing" else ""
    elif kind.endswith("_type"):  # not what is in it: it may be long
        message += " (it is a list)" if isinstance(value, list) else " (it is an object)"
    if kind in _KINDS_SHOWN:
        message += f" [{kind}]"
    return _info(400, f"{place}: {message}" if place else message, None, place)


_KINDS_SHOWN = ("greater_than_equal", "less_than_equal")  # vLLM shows them, and its clients' tests look for them
_SOURCES = ("body", "query", "path", "header")
_TYPES = ("str", "int", "float", "bool", "none", "list", "dict")


def _place(location: Sequence[str | int]) -> str | None:
    """Where an error is, as `messages[0].role`; the names that pydantic gives a union's branches are left out."""
    keys = location[1:] if location and location[0] in _SOURCES else location
    place = ""
    for key in keys:
        if isinstance(key, int):
            place += f"[{key}]"
        elif re.fullmatch("[a-z_][a-z_0-9]*", key) and key not in _TYPES:
            place += f".{key}" if place else key
    return place or None


def quote(value: Any) -> str:
    """A value that a client sent, at a length that a message can have."""
    if isinstance(value, str) and len(value) > _LONGEST_QUOTE:
        return repr(value[:_LONGEST_QUOTE])[:-1] + "...'"
    text = repr(value)
    return text if len(text) <= _LONGEST_QUOTE + 2 else text[:_LONGEST_QUOTE] + "..."


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_MESSAGE else text[: _LONGEST_MESSAGE - 3] + "..."
