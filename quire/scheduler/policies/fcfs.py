"""First come, first served: the order in which requests were added.

Registered in `quire.scheduler.policies.registry`.
"""

from quire.protocol.requests import NewRequest
from quire.scheduler.policies.base import Policy


class FirstComeFirstServed(Policy):
    """Requests run in the order in which they were added, whatever their priority."""

    def key(self, request: NewRequest, order: int, now: float) -> tuple[int]:
        """The order of add."""
        return (order,)
