"""Scheduling policies by name. A new policy is one module like `fcfs` and one line here.

The scheduler asks a policy for each request's place once, when the request is added.
"""

from collections.abc import Callable
from typing import Any, Protocol

from quire.protocol.step import NewRequest
from quire.scheduler.fcfs import FirstComeFirstServed
from quire.scheduler.priority import Priority


class Policy(Protocol):
    """The order of requests."""

    def key(self, request: NewRequest, order: int) -> tuple[Any, ...]:
        """Sort key of a request, the `order`-th that was added; smaller runs earlier. Must end in `order`."""
        ...

    def preempts(self, waiting: NewRequest, running: NewRequest) -> bool:
        """Whether a waiting request may push out a running one for its blocks or its place."""
        ...


POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": Priority,
}
