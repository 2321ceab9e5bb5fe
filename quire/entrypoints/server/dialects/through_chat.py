"""Requests of other APIs as chat requests: /v1/responses, /v1/messages and Ollama's are read this way.

So there is one place where conversations, tools, formats and sampling parameters are read; a refusal of it is told by
the names of the API that was asked.
"""

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import ValidationError

from quire.entrypoints.server.chat_request import ChatCompletionRequest
from quire.entrypoints.server.dialects.chat import ChatWriter, read_chat
from quire.entrypoints.server.errors import describe
from quire.entrypoints.server.requests_common import AnyRequest, GenerationRequest
from quire.entrypoints.server.service import Asked
from quire.entrypoints.server.state import ServerState
from quire.entrypoints.server.unknown_fields import ignore
from quire.errors import InvalidRequestError

# Fields of all requests that these have no form for, and values that ask for nothing.
_NOT_HERE: dict[str, Any] = {
    **{"n": 1, "best_of": 1, "use_beam_search": False, "echo": False, "prompt_logprobs": None},
    **{"return_token_ids": False, "timings": False},
}
_OWN = {"model", "stream", "stream_options", "metadata", "store", "service_tier", "prompt_cache_options", *_NOT_HERE}
_SHARED = GenerationRequest.model_fields.keys() - _OWN


_Request = TypeVar("_Request", bound=AnyRequest)
_Result = TypeVar("_Result")


async def read_through_chat(
    state: ServerState, body: GenerationRequest, request_id: str, fields: dict[str, Any], names: Mapping[str, str]
) -> Asked[ChatWriter]:
    """Read a body as the chat request that has its sampling fields and these.

    Args:
        names: chat's fields -> those of the body, for errors and the log.

    Raises:
        InvalidRequestError, OverloadedError: as `Read`.
    """
    for name, harmless in _NOT_HERE.items():
        if getattr(body, name) not in (None, harmless):
            raise InvalidRequestError(f"{name} is not there for this route, only for chat; leave it out.", name)
    given = {name: getattr(body, name) for name in _SHARED & body.model_fields_set}
    given |= {name: value for name, value in fields.items() if value is not None}
    with renamed(names):
        request = validated(ChatCompletionRequest, {"model": body.model, "stream": body.stream, **given})
        turn, writer = await read_chat(state, request, request_id, names)
    for name in request.model_extra or ():
        ignore(body, names.get(name, name))
    # What the engine refuses later has the engine's names.
    return replace(turn, names={own: names.get(field, field) for own, field in turn.names.items()}), writer


def validated(form: type[_Request], fields: dict[str, Any]) -> _Request:
    """The request of these fields; InvalidRequestError where one is wrong."""
    try:
        return form.model_validate(fields)
    except ValidationError as error:
        info = describe(error)
        raise InvalidRequestError(info.message, info.param) from None


async def within_context(read: Callable[[int | None], Awaitable[_Result]], limit: int | None, name: str) -> _Result:
    """What `read` makes of a limit of the output, or without one where that is more than the context has left.

    Args:
        name: what an error calls the limit.
    """
    try:
        return await read(limit)
    except InvalidRequestError as error:
        if (error.param, error.code) != (name, "context_length_exceeded"):
            raise
        return await read(None)


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Within, a refusal calls chat's fields by the names given."""
    try:
        yield
    except InvalidRequestError as error:
        own = re.split(r"[.\[]", error.param or "")[0]
        if own not in names:
            raise
        message = re.sub(rf"\b{own}\b", names[own], str(error))
        message = message.replace(".function.", ".")
        error.args, error.param = (message,), names[own] + (error.param or "")[len(own) :].replace(".function.", ".")
        raise
