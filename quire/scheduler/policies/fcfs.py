"""First come, first served: the order in which requests were added.

Registered in `quire.scheduler.policies.registry`.
"""

from quire.protocol.requests import NewRequest
from quire.scheduler.policies.base import Key, Policy


class FirstComeFirstServed(Policy):
    """Requests run in the order in which they were added, whatever their priority; nobody pushes out anybody."""

    def key(self, request: NewRequest, order: int) -> Key:
        """The order of add."""
        return (order,)

    def explain(self, request: NewRequest, first: NewRequest) -> str:
        """It came later."""
        return "those came earlier"
