"""What is said of what vLLM has and Quire has not: files of answers, one for parameters, for options and for fields.

The head of quire/entrypoints/not_yet.txt tells their form. Nobody reads one before an unknown name is given.
"""

import logging
from functools import cache
from pathlib import Path
from typing import Any

from quire.errors import NotYetSupportedError

logger = logging.getLogger(__name__)


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
    elif told and {"True": "so"}.get(str(value), str(value)) not in ("None", "False", "[]", "{}", *taken.split("|")):
        raise NotYetSupportedError(f"{shown or name} {told}")
    return bool(told)
