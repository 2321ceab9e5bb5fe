"""Checks the terms on which a request is to be served, against the scheduling policy that there is.

The input processor asks, and the server before it prepares a prompt. It knows policies by their names only.
"""

from quire.config.options import check_number
from quire.config.scheduler import OPTIONS_OF
from quire.errors import ConfigError, InvalidRequestError
from quire.protocol.requests import Terms

NO_TERMS = Terms()
MAX_CLIENT = 200  # characters
# Term -> its kind, the number that it must be over, and the policy that keeps to it.
_OF_POLICIES = {"priority": (int, None, "priority"), **dict.fromkeys(OPTIONS_OF["deadline"], (float, 0, "deadline"))}


def check_terms(terms: Terms, policy: str) -> None:
    """Refuse terms of the wrong kind, and those that only another policy would keep to.

    A client may be named under any policy: it says whose a request is, and asks for nothing.

    Raises:
        InvalidRequestError: the message names the field, and the policy that it needs.
    """
    if terms is NO_TERMS:
        return
    for name, (kind, over, needed) in _OF_POLICIES.items():
        if (value := getattr(terms, name)) is getattr(NO_TERMS, name):
            continue
        try:
            check_number(name, value, kind, over=over)
        except ConfigError as error:
            raise InvalidRequestError(str(error), name) from None
        if policy != needed:
            message = f"{name}={value!r} needs an engine with scheduling_policy={needed!r}; leave it out."
            raise InvalidRequestError(message, name)
    if (client := terms.client) is not None and not (isinstance(client, str) and 0 < len(client) <= MAX_CLIENT):
        shown = f"{len(client)} characters" if isinstance(client, str) else repr(client)[:80]
        raise InvalidRequestError(f"client must be a text of 1 to {MAX_CLIENT} characters, got {shown}.", "client")
