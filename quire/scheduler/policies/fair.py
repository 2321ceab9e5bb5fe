"""A fair share for each client, by virtual token counters (Sheng et al., "Fairness in Serving Large Language Models").

A client is `NewRequest.client`; requests without one share one counter. Registered in
`quire.scheduler.policies.registry`.
"""

from quire.config.scheduler import PolicyOptions
from quire.protocol.requests import NewRequest
from quire.scheduler.policies.base import Key, Policy

_MOST_IDLE = 4096  # clients remembered that have nothing here


class FairShare(Policy):
    """The client whose counter is lowest comes next; within a client, first come, first served.

    A prompt's tokens that are not in the prefix cache count when it is admitted, output tokens when they are drawn,
    each with its weight; what is computed again after a preemption counts once. A client that had nothing waiting
    starts at the lowest counter of those that have: idle time is not saved up. Nobody pushes out anybody, and whoever
    runs keeps the place that its client's counter gave it when it was admitted: so no two of them ever take turns in
    pushing each other out when blocks lack.

    Between two clients that always have requests waiting, the weighted service differs by no more than twice the larger
    of the longest prompt's and of all that may run at once, whatever the others do.
    """

    def __init__(self, options: PolicyOptions) -> None:
        super().__init__(options)
        self._counters: dict[str | None, float] = {}
        self._num_live: dict[str | None, int] = {}
        self._last_admitted: str | None = None

    def lane(self, request: NewRequest) -> str | None:
        """The client."""
        return request.client

    def rank(self, lane: str | None) -> float:
        """The client's counter."""
        return self._counters.get(lane, 0.0)

    def seat(self, request: NewRequest, key: Key) -> Key:
        """The client's counter now, then the order of add."""
        return (self.rank(request.client), *key)

    def on_added(self, request: NewRequest, lane_waits: bool, lowest_rank: float | None) -> None:
        """Lift the counter of a client that had nothing waiting."""
        client = request.client
        self._num_live[client] = self._num_live.get(client, 0) + 1
        if not lane_waits:
            floor = self.rank(self._last_admitted) if lowest_rank is None else lowest_rank
            self._counters[client] = max(self.rank(client), floor)
            if len(self._counters) > len(self._num_live) + _MOST_IDLE:
                self._forget_idle()

    def on_admitted(self, request: NewRequest, num_tokens: int) -> None:
        """Charge the prompt."""
        self._last_admitted = request.client
        self._counters[request.client] = self.rank(request.client) + num_tokens * self.options.fair_input_weight

    def on_served(self, request: NewRequest, num_tokens: int) -> None:
        """Charge what was drawn."""
        self._counters[request.client] = self.rank(request.client) + num_tokens * self.options.fair_output_weight

    def on_ended(self, request: NewRequest) -> None:
        """One request less of its client's."""
        num_live = self._num_live.pop(request.client) - 1
        if num_live:
            self._num_live[request.client] = num_live

    def explain(self, request: NewRequest, first: NewRequest) -> str:
        """By the clients' counters."""
        own, other = self.rank(request.client), self.rank(first.client)
        if request.client == first.client:
            return f"its own client's, whose turn it is: its counter stands at {own:.0f}"
        return f"its client's counter stands at {own:.0f}, that of the next in turn at {other:.0f}"

    def _forget_idle(self) -> None:
        """Drop the clients without requests whose counters are the lowest: they would be lifted the soonest."""
        keep = {*self._num_live, self._last_admitted}
        idle = sorted((c for c in self._counters if c not in keep), key=self.rank)
        for client in idle[: len(idle) // 2 + 1]:
            del self._counters[client]
