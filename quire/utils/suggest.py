"""Nearest known name for a misspelt one, and the message that says so.

Called wherever a user names an option: SamplingParams, EngineArgs, the command line, the HTTP schema.
Knows nothing of any option: the caller passes the names.
"""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name` ("-" and "_", upper and lower case are the same), or None if none is near."""
    by_key = {_key(candidate): candidate for candidate in known}
    matches = get_close_matches(_key(name), by_key, n=1, cutoff=0.6)
    return by_key[matches[0]] if matches else None


def hint(name: str, known: Iterable[str], otherwise: str) -> str:
    """A sentence that asks for the known name closest to `name`; `otherwise` where none is near."""
    close = nearest(name, known)
    return f"Did you mean {close!r}?" if close else otherwise


def unknown_name_message(owner: str, names: Iterable[str], known: Iterable[str]) -> str:
    """One sentence per unknown name, as ``SamplingParams has no argument 'top_pp'. Did you mean 'top_p'?``."""
    known = list(known)
    listed = f"Known: {', '.join(known)}."
    return " ".join(f"{owner} has no argument {name!r}. {hint(name, known, listed)}" for name in names)


def _key(name: str) -> str:
    return name.lower().lstrip("-").replace("-", "_")
