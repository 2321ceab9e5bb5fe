"""Sequences in the order of their keys, and the waiting ones of them in lanes, which take turns by their ranks.

The planner keeps both. Keys are unique and never change in a queue, or in a lane; a policy that looks at what was
served changes the rank of a lane, and only that lane's place is found anew, however many wait in it.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from quire.scheduler.sequence import Sequence

Lane = str | None
Turn = tuple[float, tuple[Any, ...], Lane]  # rank, key of its first sequence, lane

_key = attrgetter("key")


def insert(queue: list[Sequence], sequence: Sequence) -> None:
    """Put a sequence at its place, by a search and a short move of memory."""
    insort(queue, sequence, key=_key)


def remove(queue: list[Sequence], sequence: Sequence) -> None:
    """Take a sequence out."""
    place = place_in(queue, sequence)
    assert queue[place] is sequence, "the sequence is not in the queue"
    del queue[place]


def place_in(queue: list[Sequence], sequence: Sequence) -> int:
    """How many come before a sequence of this queue."""
    return bisect_left(queue, sequence.key, key=_key)


class WaitingQueue:
    """Sequences by (rank of their lane, key). What is done to one costs a search, and a short move of memory."""

    def __init__(self, rank: Callable[[Lane], float]) -> None:
        self._rank = rank
        self._lanes: dict[Lane, list[Sequence]] = {}
        self._turns: list[Turn] = []  # sorted, one a lane
        self._turn_of: dict[Lane, Turn] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """Lane by lane, as if no rank would change meanwhile."""
        for _, _, lane in self._turns:
            yield from self._lanes[lane]

    @property
    def first(self) -> Sequence:
        """Who comes next, of at least one."""
        return self._lanes[self._turns[0][2]][0]

    @property
    def lowest_rank(self) -> float | None:
        """That of the lane whose turn it is; None where nobody waits."""
        return self._turns[0][0] if self._turns else None

    def has(self, lane: Lane) -> bool:
        """Whether anybody waits in a lane."""
        return lane in self._lanes

    def order_of(self, sequence: Sequence) -> tuple[Any, ...]:
        """What the order goes by, of a sequence that waits here."""
        return (*self._turn_of[sequence.group.lane][:2], sequence.key)

    def place(self, sequence: Sequence) -> tuple[int, int]:
        """How many lanes come before a sequence's own, and how many sequences within that."""
        lane = sequence.group.lane
        return bisect_left(self._turns, self._turn_of[lane]), place_in(self._lanes[lane], sequence)

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence at its place."""
        lane = sequence.group.lane
        queue = self._lanes.setdefault(lane, [])
        insert(queue, sequence)
        self._num_waiting += 1
        if queue[0] is sequence:
            self.reorder(lane)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        lane = sequence.group.lane
        queue = self._lanes[lane]
        was_first = queue[0] is sequence
        remove(queue, sequence)
        self._num_waiting -= 1
        if was_first:
            self.reorder(lane)

    def reorder(self, lane: Lane) -> None:
        """Find a lane's place anew: its rank or its first sequence has changed. One that is not here is ignored."""
        if (turn := self._turn_of.pop(lane, None)) is not None:
            del self._turns[bisect_left(self._turns, turn)]
        if queue := self._lanes.get(lane):
            turn = self._turn_of[lane] = (self._rank(lane), queue[0].key, lane)
            insort(self._turns, turn)
        else:
            self._lanes.pop(lane, None)
