"""What a policy is: the order of requests, who may push out whom, and who is told at once to come later.

The scheduler asks for a key when a request is added. A key never changes: where the order depends on what was served,
requests are put in lanes (a client each, say), whose rank may. A policy sees requests, never sequences, blocks or
results; it reads no clock, as the time is given to it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from quire.config.scheduler import PolicyOptions
from quire.protocol.requests import NewRequest

Key = tuple[Any, ...]


class Prompt(NamedTuple):
    """A request that has a prompt to be computed: so many tokens of it are left; it may run already."""

    request: NewRequest
    num_tokens: int
    runs: bool


class Load(NamedTuple):
    """The engine as a request finds it that is just coming."""

    num_seats: int  # sequences that may run at once
    budget: int  # most tokens of a step
    tokens_left: list[int]  # that each running sequence may still draw, ascending
    prompts: list[Prompt]  # in order


class Policy:
    """The order of requests; one object serves one scheduler, and goes on by other `options` where those are changed.

    It is told then that all who live have ended, and of each anew: what it has learnt from them it keeps.

    What is here is what a policy without wishes does: requests run in the order in which they were added, whatever
    their priority, and nobody pushes out anybody. That is "fcfs".
    """

    def __init__(self, options: PolicyOptions) -> None:
        self.options = options

    # The order.

    def key(self, request: NewRequest, order: int) -> Key:
        """Sort key of a request, the `order`-th that was added; smaller runs earlier in its lane. Ends in `order`."""
        return (order,)

    def lane(self, request: NewRequest) -> str | None:
        """The lane that a request waits in; lanes take turns by their ranks."""
        return None

    def rank(self, lane: str | None) -> float:
        """The lane of the lowest rank comes first. It may change in `on_added`, `on_admitted` and `on_served` only."""
        return 0.0

    def seat(self, request: NewRequest, key: Key) -> Key:
        """The key among those that run, of a request that is admitted now; it stays until that is preempted.

        When blocks run out the last one goes, and the first always advances.
        """
        return key

    def preempts(self, waiting: NewRequest, running: NewRequest) -> bool:
        """Whether a waiting request may push out a running one for its blocks or its place.

        It must follow the order: never true for a request that would run after the other one, nor both ways round.
        """
        return False

    def budget(self, limit: int, num_running: int) -> int:
        """Most tokens of the next step, where `limit` may be and `num_running` sequences want one each."""
        return limit

    # What happens.

    def check(self, request: NewRequest, now: float, load: Callable[[], Load]) -> None:
        """Refuse a request that had better not come now (OverloadedError)."""

    def on_added(self, request: NewRequest, lane_waits: bool, lowest_rank: float | None) -> None:
        """A request was added; whether its lane has others waiting, and the lowest rank of all lanes that have."""

    def on_admitted(self, request: NewRequest, num_tokens: int) -> None:
        """A request runs for the first time; so many tokens of its prompt are to be computed."""

    def on_served(self, request: NewRequest, num_tokens: int) -> None:
        """So many tokens were drawn for a request."""

    def on_step(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""

    def on_ended(self, request: NewRequest) -> None:
        """A request has ended."""

    # What may be asked.

    def explain(self, request: NewRequest, first: NewRequest) -> str:
        """Why `first` comes before `request`, with numbers."""
        return "those came earlier"
