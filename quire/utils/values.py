"""Plain Python values of what users pass: numpy's and torch's numbers, paths, lists, checked for what they hold.

Parameter classes and the input processor use it. It knows no field: the caller names it, for the refusal.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from quire.errors import broken, require

Number = TypeVar("Number", int, float)


def plain(value: Any) -> Any:
    """Python's own number for a numpy or torch scalar, and the text of a path; anything else as it is."""
    if type(value) in (int, float, bool):
        return value
    try:
        return os.fspath(value) if isinstance(value, os.PathLike) else value.item()
    except Exception:  # neither, or an array of several values: left to fail the type check
        return value


def number(value: Any, kind: type[Number]) -> Number | None:
    """The number as one of its kind; None where it is none (a bool, a str, an int beyond a float's range)."""
    if type(value) is kind:
        return value
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        return None
    try:
        return kind(value)
    except OverflowError:
        return None


def decimal(text: str) -> int | None:
    """The number that digits stand for; None of other texts, and of more digits than 64 bits hold."""
    return int(text) if text.isdecimal() and len(text) < 20 else None


def items(field: str, value: Any, what: str) -> list[Any]:
    """The items of a list of any kind; [] of None."""
    if value is None or type(value) is list:
        return list(value or ())
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise broken(field, value, f"a list of {what}")
    return list(value)


def strings(field: str, value: Any) -> list[str]:
    """The items of a list of texts, of which none is empty."""
    found = items(field, value, "strings")
    for string in found:
        require(isinstance(string, str) and string != "", field, string, "a list of non-empty strings")
    return found


def token_ids(field: str, value: Any) -> list[int]:
    """The items of a list of token ids."""
    found: list[int] = []
    for item in items(field, value, "token ids"):
        if (token_id := number(item, int)) is None or token_id < 0:
            raise broken(field, item, "a list of token ids (integers >= 0)")
        found.append(token_id)
    return found
