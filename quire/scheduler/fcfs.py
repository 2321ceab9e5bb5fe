"""First come, first served: the order in which requests were added.

Registered in `quire.scheduler.policy`.
"""

from quire.protocol.step import NewRequest


class FirstComeFirstServed:
    """Requests run in the order in which they were added, whatever their priority."""

    def key(self, request: NewRequest, order: int) -> tuple[int]:
        """The order of add."""
        return (order,)

    def preempts(self, waiting: NewRequest, running: NewRequest) -> bool:
        """Who runs is only preempted by what runs already and needs the blocks."""
        return False
