"""By priority, the lower number first; first come, first served among equals.

Registered in `quire.scheduler.policies.registry`.
"""

from quire.protocol.requests import NewRequest
from quire.scheduler.policies.base import Key, Policy


class Priority(Policy):
    """Requests run by (priority, arrival time, order of add); a better one takes the place of a worse one."""

    def key(self, request: NewRequest, order: int) -> Key:
        """Priority, then arrival, then order of add."""
        return (request.priority, request.arrival_time, order)

    def preempts(self, waiting: NewRequest, running: NewRequest) -> bool:
        """Only a strictly better priority pushes a running request out."""
        return waiting.priority < running.priority

    def explain(self, request: NewRequest, first: NewRequest) -> str:
        """By priority, or by arrival."""
        if request.priority == first.priority:
            return f"those came earlier, or have a lower number than its priority {request.priority}"
        return f"its priority is {request.priority}, that of the first {first.priority}"
