"""What is said of keywords that Quire has not: which was meant, or why one of vLLM's is not here.

vLLM's stand in files of answers, one for parameters beside this and one for options; the head of
quire/entrypoints/not_yet.txt tells the form, and nobody reads one before an unknown keyword is given. Parameter classes
have the metaclass: msgspec builds structs in C and would only say "unexpected keyword".
"""

import logging
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from quire.errors import InvalidRequestError, NotYetSupportedError
from quire.utils.suggest import unknown_name_message

logger = logging.getLogger(__name__)
_PARAMETERS = Path(__file__).with_name("keywords.txt")


class UnknownParameterError(InvalidRequestError, TypeError):
    """A keyword that a parameter class does not have (a TypeError too, as for any other call)."""


class NamesUnknownKeywords(type(msgspec.Struct)):
    """Metaclass of structs whose constructor raises UnknownParameterError; vLLM's keywords may ask for nothing."""

    def __call__(cls, *args, **kwargs):
        try:
            return super().__call__(*args, **kwargs)
        except TypeError:
            unknown = [name for name in kwargs if name not in cls.__struct_fields__]
            if not unknown:
                raise
        if strange := [name for name in unknown if not take_anyway(_PARAMETERS, name, kwargs[name])]:
            raise UnknownParameterError(unknown_name_message(cls.__name__, strange, cls.__struct_fields__), strange[0])
        return super().__call__(*args, **{name: kwargs[name] for name in kwargs if name not in unknown})


@cache
def read_answers(path: Path) -> dict[str, tuple[str, str]]:
    """Name -> what of it is taken all the same, and what is said."""
    lines = path.read_text(encoding="utf-8").splitlines()
    entries = [line.split(": ", 1) for line in lines if line and line[0] != "#"]
    return {each.partition("=")[0]: (each.partition("=")[2], told) for names, told in entries for each in names.split()}


def take_anyway(answers: Path, name: str, value: Any, shown: str | None = None) -> bool:
    """Whether a name is one of the answers', and this value of it no error; where it has no effect, the log says so.

    Args:
        shown: what messages call it; its name by default.

    Raises:
        NotYetSupportedError: the message says why, and what to do instead.
    """
    taken, told = read_answers(answers).get(name, ("", ""))
    if taken in ("-", "*", "+") and value is not None and value is not False:
        logger.warning("%s %s", shown or name, told)
    elif told and {"True": "so"}.get(str(value), str(value)) not in ("None", "False", *taken.split("|")):
        raise NotYetSupportedError(f"{shown or name} {told}")
    return bool(told)
