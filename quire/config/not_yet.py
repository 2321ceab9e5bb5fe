"""Options of vLLM that Quire does not have, by name: what to say to someone who gives one.

`EngineArgs` and the command line ask where an unknown option is given; the answers stand in not_yet.txt, which nobody
reads before. An entry goes when its feature comes.
"""

import logging
from functools import cache
from pathlib import Path
from typing import Any

from quire.errors import NotYetSupportedError

logger = logging.getLogger(__name__)


@cache
def answers() -> dict[str, tuple[str, str]]:
    """Name (underscores, no dashes before it; or one dash) -> what of it is taken all the same, and what is said."""
    lines = Path(__file__).with_name("not_yet.txt").read_text(encoding="utf-8").splitlines()
    entries = [line.split(": ", 1) for line in lines if line and line[0] != "#"]
    return {each.partition("=")[0]: (each.partition("=")[2], told) for names, told in entries for each in names.split()}


def take_anyway(name: str, value: Any, shown: str | None = None) -> bool:
    """Whether an option is one of these, and this value of it no error; where it has no effect, the log says so.

    Args:
        shown: what messages call it; its name by default.

    Raises:
        NotYetSupportedError: the message says why, and what to do instead.
    """
    taken, told = answers().get(name, ("", ""))
    if taken in ("-", "*", "+") and value is not None and value is not False:
        logger.warning("%s %s", shown or name, told)
    elif told and str(value) not in ("None", "False", *taken.replace("so", "True").split("|")):
        raise NotYetSupportedError(f"{shown or name} {told}")
    return bool(told)
