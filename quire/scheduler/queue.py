"""The queue of sequences in the policy's order: one of those that wait, one of those that run.

The planner keeps both. Keys are unique, and change through `rekey` only, so that the order depends on nothing but what
was added and served.
"""

from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from quire.scheduler.sequence import Sequence

_key = attrgetter("key")


class SequenceQueue:
    """Sequences sorted by key. Adding at the end is O(1), elsewhere a search and a short move of memory."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.items)

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence at its place."""
        items = self.items
        if not items or items[-1].key < sequence.key:
            items.append(sequence)
        else:
            items.insert(bisect_left(items, sequence.key, key=_key), sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        place = bisect_left(self.items, sequence.key, key=_key)
        assert self.items[place] is sequence, "the sequence is not in the queue"
        del self.items[place]

    def rekey(self, sequence: Sequence, key: tuple[Any, ...]) -> None:
        """Give a sequence of this queue another key, and the place that goes with it."""
        self.remove(sequence)
        sequence.key = key
        self.add(sequence)
