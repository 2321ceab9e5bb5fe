"""Fields of a request's body that no route knows: told to the client in a header, and to the operator once a name.

Routes with bodies call `warn_client`, services `ServerState.admit`, and who finds a field of no use `ignore`. A body's
model keeps such fields (`extra="allow"`). What asks for a feature that is not there the models refuse by name, and
`answer_vllms` where vLLM alone knows the field.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel
from starlette.responses import Response

from quire.errors import InvalidRequestError, NotYetSupportedError
from quire.utils.answers import read_answers, take_anyway
from quire.utils.logs import logger, quoted

_VLLMS = Path(__file__).with_name("fields.txt")
HEADER = "x-quire-warnings"
_MOST_SHOWN = 10  # names in a header, or in a line of the log
_MOST_NOTED = 500  # names in the log of a server's whole life
_LONGEST_NAME = 40  # characters


def unknown_fields(body: BaseModel) -> list[str]:
    """Names of the fields that the body's model, or that of an object in it, does not have."""
    names = list(body.model_extra or ())
    for name in sorted(body.model_fields_set & type(body).model_fields.keys()):  # without those, which may be a million
        value = getattr(body, name)
        if isinstance(value, BaseModel):
            names += [f"{name}.{inner}" for inner in value.model_extra or ()]
    return names


def answer_vllms(body: BaseModel) -> None:
    """Take those of vLLM's fields that ask for nothing away from the unknown ones.

    Raises:
        InvalidRequestError: one asks for something that is not there.
    """
    extra = body.model_extra or {}  # a million, maybe
    for name in sorted(read_answers(_VLLMS).keys() & extra.keys()):
        is_long = isinstance(value := extra[name], list | dict) and len(value) > 0
        try:
            take_anyway(_VLLMS, name, "[...]" if is_long else value)  # which shows it as text
        except NotYetSupportedError as error:
            raise InvalidRequestError(str(error), name, "not_supported") from None
        delattr(body, name)
        body.model_fields_set.remove(name)


def ignore(body: BaseModel, name: str) -> None:
    """Count a field that is of no use to this model among those that nobody knows."""
    if body.model_extra is not None:
        body.model_extra[name] = None


def warn_client(response: Response, body: BaseModel) -> None:
    """Name the body's unknown fields in the response's header."""
    if names := unknown_fields(body):
        response.headers[HEADER] = f"unknown fields, which are ignored: {_listed(names)}"


class UnknownFieldLog:
    """Notes each name once, and no more than a server's log can bear."""

    def __init__(self) -> None:
        self._noted: set[str] = set()

    def note(self, body: BaseModel, sent_as: Mapping[str, str] | None = None) -> None:
        """One warning for all names in the body that were not noted before; `sent_as`: what the client calls some."""
        names = unknown_fields(body)[:_MOST_NOTED]  # a body may have a million of them
        names = [(sent_as or {}).get(name, name) for name in names]
        names = [name for name in dict.fromkeys(names) if name[:_LONGEST_NAME] not in self._noted]
        if names and len(self._noted) < _MOST_NOTED:
            self._noted.update(name[:_LONGEST_NAME] for name in names[:_MOST_SHOWN])
            logger.warning("a request has unknown fields, which are ignored: %s", _listed(names))


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(quoted(name, _LONGEST_NAME) for name in names[:_MOST_SHOWN])
    return shown if len(names) <= _MOST_SHOWN else f"{shown} and {len(names) - _MOST_SHOWN} more"
