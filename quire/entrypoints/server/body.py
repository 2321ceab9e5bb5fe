"""How a handler gets its JSON body: decoded by msgspec, then validated by the handler's pydantic model.

A router whose handlers take a body is made with `APIRouter(route_class=JsonRoute)`; handlers declare `body: Model` as
usual. How large a body may be is the middleware's matter.
"""

import gc
import re
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from itertools import repeat
from math import isinf
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from quire.errors import InvalidRequestError

_TELL_OF_THE_SERVER = frozenset(("server", "models", "responses", "ollama"))  # tags of routes that need no model

_MOST_FLOATS = 100_000  # in a body
_MOST_LISTS = 1_000_000  # likewise, with objects: an empty one takes a hundred bytes where it is read, and two here
_MOST_NAMES = 10_000  # of the body's own object: each unknown one is looked at, in 3 us
_MOST_TEXTS = 200_000  # with names, anywhere in a body: a new name takes half a microsecond
_MOST_VALUES = 3_000_000  # of all kinds
_LARGE = 1 << 16  # bytes of a body that may hold so many that others wait for it
_NEAR_END = 11  # bytes: half of a pair is six, and with five more behind it the other half can't be missing
_ENDS_IN_HALF = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}[^\\]{1,5}\Z")
_FROM_BROWSERS = frozenset(("origin", "sec-fetch-site"))  # headers that a foreign page's request has


class JsonRequest(Request):
    """A request whose body is a JSON object, and strictly so: valid UTF-8, no NaN or Infinity, of bounded depth."""

    async def json(self) -> dict[str, Any]:
        if not hasattr(self, "_object"):
            self._object = decode_object(await self.body())
        return self._object


class JsonRoute(APIRoute):
    """A route whose handler may take a JSON object as its body.

    Attributes:
        takes_any_type: programs other than browsers need not say that the body is JSON: curl's -d does not.
    """

    takes_any_type = False

    def prepare(self, body: dict[str, Any], names: Sequence[str]) -> None:
        """Change a body, for another form of the served models' `names`, before anybody reads it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, takes_body = super().get_route_handler(), self.body_field is not None
        needs_model = takes_body and "models" not in self.tags or _TELL_OF_THE_SERVER.isdisjoint(self.tags)

        async def handle_json(request: Request) -> Response:
            name = None
            if takes_body:
                if self.takes_any_type and _FROM_BROWSERS.isdisjoint(request.headers):
                    others = [pair for pair in request.scope["headers"] if pair[0] != b"content-type"]
                    request.scope["headers"] = [*others, (b"content-type", b"application/json")]
                else:
                    _check_content_type(request)
                request = JsonRequest(request.scope, request.receive)
                # Here, for FastAPI has one text for all that can be wrong with it.
                body = await request.json()
                self.prepare(body, request.app.state.quire.names)
                name = body.get("model")
            if needs_model and (fleet := request.app.state.fleet) is not None:
                name = request.query_params.get("model") if name is None else name
                if not await fleet.enter(request, name):
                    return Response(status_code=499)  # for the log: nobody reads it
            return await handle(request)

        return handle_json


def decode_object(body: bytes) -> dict[str, Any]:
    """The object of a JSON text; its own numbers are integers where they are whole.

    Raises:
        InvalidRequestError: it is no JSON, or no object.
    """
    if not body:
        raise InvalidRequestError("the body is empty; send a JSON object.")
    if body.count(b"[") + body.count(b"{") > _MOST_LISTS:  # or so: texts may have some
        raise InvalidRequestError(f"the body has more than {_MOST_LISTS} brackets and braces; send less at once.")
    if len(body) > _LARGE:  # neither msgspec nor pydantic lets others go on before it is done
        plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote begins or ends a text
        if plain.count(b'"') > 2 * _MOST_TEXTS:
            raise InvalidRequestError(f"the body has more than {_MOST_TEXTS} names and texts; send less at once.")
        if plain.count(b",") > _MOST_VALUES and sum(part.count(b",") for part in plain.split(b'"')[::2]) > _MOST_VALUES:
            raise InvalidRequestError(f"the body has more than {_MOST_VALUES} values; send less at once.")
    collects = gc.isenabled()
    gc.disable()  # it would go through millions of new objects again and again, and none of them is garbage
    try:
        # msgspec's own way to read them takes 30 us for one like 1e308: millions of them would take minutes.
        decode = msgspec.json.Decoder(float_hook=partial(_read_float, repeat(True, _MOST_FLOATS))).decode
        value = decode(body.removeprefix(b"\xef\xbb\xbf"))  # of a file that was written on Windows
    except RecursionError:
        raise InvalidRequestError("the body's JSON is nested too deeply.") from None
    except UnicodeDecodeError:
        raise InvalidRequestError("the body is not valid UTF-8.") from None
    except ValueError as error:  # msgspec.DecodeError, or an integer of more digits than Python reads
        # Half of a pair as the last character: msgspec looks beyond the body's end for the other half.
        cause = "half of a surrogate pair stands alone" if _ENDS_IN_HALF.search(body[-_NEAR_END:]) else error
        raise InvalidRequestError(f"the body is not valid JSON: {cause}.") from None
    finally:
        if collects:
            gc.enable()
    if not isinstance(value, dict):
        raise InvalidRequestError(f"the body must be a JSON object; it is {_NAMES.get(type(value), 'a number')}.")
    if len(value) > _MOST_NAMES:
        raise InvalidRequestError(f"the body's object has more than {_MOST_NAMES} names; send what the route takes.")
    # 16.0 is an integer of JSON's, and what clients of languages with one kind of number write.
    return value | {name: int(given) for name, given in value.items() if type(given) is float and given.is_integer()}


def _read_float(left: Iterator[bool], text: str) -> float:
    if not next(left, False) or isinf(value := float(text)):
        raise ValueError(f"more than {_MOST_FLOATS} numbers are no integers, or {text:.20} is out of range")
    return value


_NAMES = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}


def _check_content_type(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Asked for, and not assumed where it is missing: a foreign page can't send it without a preflight.
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise HTTPException(415, "the body must be JSON; send it with 'Content-Type: application/json'.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HTTPException(415, "the body is compressed, as its Content-Encoding says; send it as it is.")
