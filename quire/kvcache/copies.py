"""The copies-on-write of the plan being made, and their sources, which nobody may write to before they were read.

The KV manager notes each copy and gives blocks back through here; when the plan is complete it takes the copies out.
"""

from collections.abc import Sequence
from typing import NamedTuple

from quire.kvcache.groups import KVGroup


class BlockCopy(NamedTuple):
    """A sequence's shared block, replaced by one of its own."""

    sequence_id: int
    group: int
    source: int
    destination: int


class PlannedCopies:
    """Copies in the order in which they were asked for."""

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        self._groups = groups
        self._copies: list[BlockCopy] = []
        self._held: list[tuple[int, int]] = []  # (group, source) that nobody owns any more

    def add(self, copy: BlockCopy) -> None:
        """Plan a copy, and drop one owner of its source."""
        self._copies.append(copy)
        self.release(copy.group, [copy.source])

    def release(self, group: int, blocks: Sequence[int]) -> None:
        """Drop an owner of each block, last to first; those that copies are still to be made of stay held."""
        pool = self._groups[group].pool
        sources = {copy.source for copy in self._copies if copy.group == group}
        for block in reversed(blocks):
            if block in sources and pool.ref_counts[block] == 1:
                self._held.append((group, block))
            else:
                pool.release(block)

    def concern(self, sequence_id: int) -> bool:
        """Whether a sequence's table has blocks that are still to be copied."""
        return any(copy.sequence_id == sequence_id for copy in self._copies)

    def drop(self, sequence_id: int) -> None:
        """A sequence gives its blocks back: its copies need not be made, and hold nothing any more."""
        if not self._copies:
            return
        self._copies = [copy for copy in self._copies if copy.sequence_id != sequence_id]
        sources = {(copy.group, copy.source) for copy in self._copies}
        needless = [entry for entry in self._held if entry not in sources]
        self._held = [entry for entry in self._held if entry in sources]
        for group, block in needless:
            self._groups[group].pool.release(block)

    def take(self) -> list[tuple[int, int, int]]:
        """The plan is complete: its copies as (group, source, destination), whose sources may be handed out again."""
        copies, self._copies = self._copies, []
        while self._held:
            group, block = self._held.pop()
            self._groups[group].pool.release(block)
        return [(copy.group, copy.source, copy.destination) for copy in copies]

    def check_none(self) -> None:
        """Raise AssertionError while a plan is being made."""
        assert not self._copies, "a plan was left incomplete"
        assert not self._held, "a plan was left incomplete"
