"""What a policy is: the order of requests, which may change as they are served.

The scheduler asks for a key when a request is added, and again for those requests that a policy names after a step. A
policy sees requests, never sequences, blocks or results; it reads no clock, as the time is given to it.
"""

from collections.abc import Iterable
from typing import Any

from quire.protocol.requests import NewRequest


class Policy:
    """The order of requests; one object serves one scheduler."""

    def key(self, request: NewRequest, order: int, now: float) -> tuple[Any, ...]:
        """Sort key of a request, the `order`-th that was added; smaller runs earlier. Must end in `order`."""
        raise NotImplementedError

    def preempts(self, waiting: NewRequest, running: NewRequest) -> bool:
        """Whether a waiting request may push out a running one for its blocks or its place.

        It must follow the keys: never true for a waiting request that comes after the running one.
        """
        return False

    def on_served(self, request: NewRequest, num_tokens: int) -> Iterable[str]:
        """So many tokens of a request were computed; returns the ids of requests whose key changed by it.

        Ids of requests that have ended are ignored.
        """
        return ()
