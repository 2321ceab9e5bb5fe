"""The web application: the routes, what surrounds them, and the OpenAPI description of it all.

`launch` calls `build_app` once the engine is up; tests call it with an engine of their own. Nothing that it serves
makes a browser fetch anything from elsewhere.
"""

import importlib
import inspect
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import quire
from quire.entrypoints.server import adapters, admin, info, live, pages
from quire.entrypoints.server.errors import ANTHROPIC, STATUSES, error_response, is_ollama, route_path
from quire.entrypoints.server.fleet import Fleet, Leases
from quire.entrypoints.server.llama_routes import router as of_llama
from quire.entrypoints.server.middleware import PUBLIC_PATHS, ApiKeys, BaseURLs, Frame, RequestLimits
from quire.entrypoints.server.ollama_routes import router as of_ollama
from quire.entrypoints.server.prometheus import HttpCounts
from quire.entrypoints.server.response_routes import router as of_responses
from quire.entrypoints.server.responses_service import ResponsesService
from quire.entrypoints.server.state import ServerState
from quire.entrypoints.server.turn_routes import router as of_turns
from quire.errors import ConfigError, QuireError
from quire.utils.answers import read_answers


def build_app(state: ServerState | Fleet) -> FastAPI:
    """The application that serves `state`: a model, or several."""
    args, front = state.args, cast(ServerState, state)  # for those who need no model
    app = _App(
        title="Quire",
        description="Large language models behind OpenAI's API.",
        version=quire.__version__,
        docs_url=None,
        openapi_url=None if args.disable_fastapi_docs else "/openapi.json",
        redoc_url=None,
        redirect_slashes=False,  # a redirect would be built from the Host header
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.quire, app.state.fleet = state, state if isinstance(state, Fleet) else None
    app.state.responses, app.state.http = ResponsesService(front), HttpCounts()
    app.root_path = args.root_path
    # As they are: included they would all be made anew. In this order they are looked through for each request.
    about = [module.router for module in (info, adapters, admin, live, pages)]
    for router in (of_turns, of_responses, of_llama, of_ollama, *about):
        app.router.routes.extend(router.routes)
    if not args.disable_fastapi_docs:
        app.router.routes.extend(pages.docs_router.routes)
    for kind in (QuireError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _answer)
    # The last one added is the outermost.
    if isinstance(state, Fleet):
        app.add_middleware(Leases, fleet=state)
    paths = {context.path for context in iter_route_contexts(app.routes) if context.path}
    app.add_middleware(BaseURLs, routes=paths - {"/completion"})  # no spelling of it is meant by one of OpenAI's
    app.add_middleware(RequestLimits, max_body_bytes=args.max_body_bytes, max_headers=args.h11_max_header_count)
    if args.api_key:
        app.add_middleware(ApiKeys, keys=args.api_key)
    app.add_middleware(Frame, state=front, counts=app.state.http)
    if args.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=args.allowed_origins,
            allow_methods=args.allowed_methods,
            allow_headers=args.allowed_headers,
            allow_credentials=args.allow_credentials,
        )
    for path in args.middleware or ():
        added = imported(path)
        app.add_middleware(added) if isinstance(added, type) else app.middleware("http")(added)
    return app


def imported(path: str) -> Any:
    """The middleware of an import path (ConfigError where there is none)."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"middleware {path!r} can't be imported: {error}.") from None
    if not (isinstance(found, type) or inspect.iscoroutinefunction(found)):
        raise ConfigError(f"middleware {path!r} is a {type(found).__name__}, neither a class nor an async function.")
    return found


_LONGEST_GUESSED = 100  # characters of a path
_OTHERS = Path(__file__).with_name("routes.txt")  # routes of other servers, and why they are not here


async def _answer(request: Request, error: Exception) -> Response:
    # The framework says that there is no such route, and no handler.
    is_no_route = isinstance(error, HTTPException) and error.status_code == 404 and error.detail == "Not Found"
    path = route_path(request.scope)[:_LONGEST_GUESSED]
    if is_no_route and (told := read_answers(_OTHERS).get(re.sub(r"^/(v\d/|api/)?", "", path).partition("/")[0])):
        error = HTTPException(404, f"{path} {told[1]}")
    elif is_no_route and (meant := _meant_path(request)):
        error = HTTPException(404, f"there is no such route; did you mean {meant}? /docs lists those there are.")
    return error_response(error, request.scope)


def _meant_path(request: Request) -> str | None:
    """The route that is misspelt, or that a base URL is before of which `BaseURLs` can't tell."""
    known = {context.path for context in iter_route_contexts(request.app.routes) if context.path}
    given = route_path(request.scope)
    if len(given) <= _LONGEST_GUESSED and (near := get_close_matches(given, known, n=1, cutoff=0.8)):
        return near[0]
    # What is cut off is no part of a route: a path may have tens of thousands of parts.
    parts = [part for part in given[-_LONGEST_GUESSED:].split("/") if part]
    tails = ("/" + "/".join(parts[start:]) for start in range(len(parts)))
    return next((path for tail in tails for path in (tail, f"/v1{tail}") if path in known), None)


class _App(FastAPI):
    """FastAPI, with a description that names the errors as they are, and middleware that is shown HTTP alone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (super().__call__ if scope["type"] == "http" else self.router)(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            _describe_errors(super().openapi(), needs_key=bool(self.state.quire.args.api_key))
        return super().openapi()


_TEXT, _TEXT_OR_NULL = {"type": "string"}, {"anyOf": [{"type": "string"}, {"type": "null"}]}


def _object(**fields: Any) -> dict[str, Any]:
    """The schema of an object that has all of these."""
    return {"type": "object", "required": [*fields], "properties": fields}


_ANTHROPIC_ERROR = _object(type=_TEXT, message=_TEXT)
_ERROR_SCHEMAS = {
    "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL)),
    "OllamaError": _object(error=_TEXT),
    "AnthropicError": _object(type={"const": "error"}, error=_ANTHROPIC_ERROR, request_id=_TEXT),
}


def _error_content(path: str) -> dict[str, Any]:
    name = "AnthropicError" if path.startswith(ANTHROPIC) else "OllamaError" if is_ollama(path) else "Error"
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _describe_errors(schema: dict[str, Any], needs_key: bool) -> None:
    """Errors of OpenAI's form, in place of FastAPI's 422; and where an API key is needed."""
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas |= {name: {"title": name, **fields} for name, fields in _ERROR_SCHEMAS.items()}
    if needs_key:
        schema["components"]["securitySchemes"] = {"APIKey": {"type": "http", "scheme": "bearer"}}
    for path, operation in ((path, own) for path, item in schema["paths"].items() for own in item.values()):
        content, responses = _error_content(path), operation["responses"]
        responses.pop("422", None)
        statuses = [431, 500]
        if "requestBody" in operation:
            statuses += [400, 404, 413, 415, 503]
        elif operation.get("parameters"):
            statuses += [400, 404]
        if path.startswith(ANTHROPIC):
            statuses.append(529)
        if operation.get("tags") == ["admin"]:
            statuses.append(403)
        if needs_key and path not in PUBLIC_PATHS:
            operation["security"] = [{"APIKey": []}]
            statuses.append(401)
        for status in statuses:
            responses.setdefault(str(status), {"description": STATUSES[status][2], "content": content})
