"""By priority, the lower number first; first come, first served among equals.

Registered in `quire.scheduler.policies.registry`.
"""

from quire.protocol.requests import NewRequest
from quire.scheduler.policies.base import Policy


class Priority(Policy):
    """Requests run by (priority, arrival time, order of add); a better one takes the place of a worse one."""

    def key(self, request: NewRequest, order: int, now: float) -> tuple[int, float, int]:
        """Priority, then arrival, then order of add."""
        return (request.priority, request.arrival_time, order)

    def preempts(self, waiting: NewRequest, running: NewRequest) -> bool:
        """Only a strictly better priority pushes a running request out."""
        return waiting.priority < running.priority
