"""The copies of the plan being made, and their sources, which nobody may write to before they were read.

The KV manager has one for blocks that are copied on write, the `SwapSpace` one for blocks that come back from the host.
When the plan is complete the copies are taken out.
"""

from collections.abc import Sequence
from itertools import chain

from quire.kvcache.pool import BlockPool

Copy = tuple[int, int, int]  # KV group, source, destination


class PlannedCopies:
    """Copies to blocks of sequences. Each is an owner of its source until the plan is complete."""

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        """`pools`: of the sources, by group."""
        self._pools = pools
        self._copies: dict[int, list[Copy]] = {}  # by the sequence that gets them

    def add(self, sequence_id: int, copy: Copy) -> None:
        """A sequence gets a copy of a block, into one of its own; the copy takes over what it owns of the source."""
        self._copies.setdefault(sequence_id, []).append(copy)

    def num_owned(self, group: int, block: int) -> int:
        """How many of a block's owners are copies."""
        return sum(copy[:2] == (group, block) for copy in chain.from_iterable(self._copies.values()))

    def concern(self, sequence_id: int) -> bool:
        """Whether a sequence's table has blocks that are still to be copied to."""
        return sequence_id in self._copies

    def drop(self, sequence_id: int) -> None:
        """A sequence gives its blocks back: its copies need not be made, and own nothing any more."""
        for group, source, _ in self._copies.pop(sequence_id, ()):
            self._pools[group].release(source)

    def take(self) -> list[Copy]:
        """The plan is complete: its copies, whose sources may be handed out again."""
        copies = [*chain.from_iterable(self._copies.values())]
        self._copies.clear()
        for group, source, _ in reversed(copies):
            self._pools[group].release(source)
        return copies

    def check_none(self) -> None:
        """Raise AssertionError while a plan is being made."""
        assert not self._copies, "a plan was left incomplete"
