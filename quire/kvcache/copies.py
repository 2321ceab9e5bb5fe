"""The copies of the plan being made, and their sources, which nobody may write to before they were read.

The KV manager has one for blocks that are copied on write, the `SwapSpace` one for blocks that come back from the host.
When the plan is complete the copies are taken out.
"""

from collections.abc import Sequence
from typing import NamedTuple

from quire.kvcache.pool import BlockPool


class BlockCopy(NamedTuple):
    """A sequence gets a copy of a block, into one of its own."""

    sequence_id: int
    group: int
    source: int
    destination: int


class PlannedCopies:
    """Copies in the order in which they were asked for. Each is an owner of its source until the plan is complete."""

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        """`pools`: of the sources, by group."""
        self._pools = pools
        self._copies: list[BlockCopy] = []

    def add(self, copy: BlockCopy) -> None:
        """Plan a copy; it takes over what its sequence owns of the source."""
        self._copies.append(copy)

    def num_owned(self, group: int, block: int) -> int:
        """How many of a block's owners are copies."""
        return sum(copy.group == group and copy.source == block for copy in self._copies)

    def concern(self, sequence_id: int) -> bool:
        """Whether a sequence's table has blocks that are still to be copied to."""
        return any(copy.sequence_id == sequence_id for copy in self._copies)

    def drop(self, sequence_id: int) -> None:
        """A sequence gives its blocks back: its copies need not be made, and own nothing any more."""
        for copy in [copy for copy in self._copies if copy.sequence_id == sequence_id]:
            self._copies.remove(copy)
            self._pools[copy.group].release(copy.source)

    def take(self) -> list[tuple[int, int, int]]:
        """The plan is complete: its copies as (group, source, destination), whose sources may be handed out again."""
        copies, self._copies = self._copies, []
        for copy in reversed(copies):
            self._pools[copy.group].release(copy.source)
        return [(copy.group, copy.source, copy.destination) for copy in copies]

    def check_none(self) -> None:
        """Raise AssertionError while a plan is being made."""
        assert not self._copies, "a plan was left incomplete"
