"""Sequences in the order of their keys: those that run, or one lane of those that wait.

Keys are unique and never change in a queue, so that the order depends on nothing but what was added and served.
"""

from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter

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
        place = self.place(sequence)
        assert self.items[place] is sequence, "the sequence is not in the queue"
        del self.items[place]

    def place(self, sequence: Sequence) -> int:
        """How many come before a sequence of this queue."""
        return bisect_left(self.items, sequence.key, key=_key)
