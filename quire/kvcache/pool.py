"""The pool of KV blocks: reference counts, the list of free blocks, and which block holds which content.

The KV manager and its parts are the only callers. A block is a number that lists and dicts share: it takes 155 bytes,
and some 120 more once its content can be found. It must not know of sequences, tokens or tensors.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from quire.kvcache.residency import UNSAMPLED, Residency, ResidencyTimes

_FREE, _CACHED, _OWNED = 0, 1, 2  # what `states` says of a block


class BlockPool:
    """Blocks 0 .. num_blocks - 1, each owned by ``ref_counts[block]`` block tables; a block with no owner is free.

    A free block may still hold content that a hash leads to. Free blocks stand in order: they are taken at the front,
    where those without a hash stand; those with one are appended at the end when freed, so that the least recently used
    content goes first. Every call is O(1) a block.

    Attributes:
        num_shared: blocks with more than one owner.
        num_evicted: blocks handed out although their content could be found, since the start.
        on_evicted: told of each block that `allocate` hands out although it held content, with the content's name.
    """

    def __init__(self, num_blocks: int, times: ResidencyTimes | None = None) -> None:
        """`times`: where it is noted how long the contents of some blocks stay."""
        self.num_blocks = num_blocks
        self.num_shared = 0
        self.num_evicted = 0
        self.ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free = OrderedDict[int, None].fromkeys(range(num_blocks))
        self._states = bytearray(num_blocks)
        self.on_evicted: list[Callable[[tuple[int, bytes]], object]] = []
        self._residency = Residency(times or ResidencyTimes())

    @property
    def num_free(self) -> int:
        """Blocks without an owner."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks (there must be as many) for one owner each, forgetting what they held."""
        assert count <= len(self._free), "allocate() without looking at num_free"
        taken = [self._free.popitem(False)[0] for _ in range(count)]
        for block in taken:
            self.ref_counts[block] = 1
            self._states[block] = _OWNED
            if (block_hash := self._hashes[block]) is not None:
                self._evict(block, block_hash)
        return taken

    def acquire(self, block: int) -> None:
        """Add an owner to a block, free or not."""
        count = self.ref_counts[block]
        if count == 0:
            del self._free[block]
            self._states[block] = _OWNED
        elif count == 1:
            self.num_shared += 1
        self.ref_counts[block] = count + 1
        if not block & UNSAMPLED:
            self._residency.on_used(block)

    def release(self, block: int) -> None:
        """Drop an owner of a block; without any left it is free."""
        count = self.ref_counts[block] = self.ref_counts[block] - 1
        if count == 1:
            self.num_shared -= 1
        elif count == 0:
            is_known = self._hashes[block] is not None
            self._free[block] = None  # at the end
            if not is_known:
                self._free.move_to_end(block, False)
            self._states[block] = _CACHED if is_known else _FREE
            if not block & UNSAMPLED:
                self._residency.on_left(block)

    def release_all(self, blocks: Sequence[int]) -> None:
        """Drop an owner of each block, last to first, so that a sequence's end is evicted before its beginning."""
        for block in reversed(blocks):
            self.release(block)

    def find(self, block_hash: bytes) -> int | None:
        """The block that holds this content, or None."""
        return self._block_of.get(block_hash)

    def holds(self, block_hash: bytes) -> bool:
        """Whether some block holds this content."""
        return block_hash in self._block_of

    def register(self, block: int, block_hash: bytes) -> None:
        """Make an owned block findable by the hash of its content.

        One hash leads to one block: where another one in use holds the same content already, this one stays unknown;
        where that one is free, this one, which was used later, takes its place.
        """
        assert self.ref_counts[block] > 0, "registering a free block"
        held = self._block_of.get(block_hash)
        if held == block:
            return
        assert self._hashes[block] is None, "a block has one content"
        if held is not None:
            if self.ref_counts[held] > 0:
                return
            self.forget(held)
            self._free.move_to_end(held, False)
        self._block_of[block_hash] = block
        self._hashes[block] = block_hash
        if not block & UNSAMPLED:
            self._residency.on_stored(block)

    def is_registered(self, block: int) -> bool:
        """Whether a hash leads to this block."""
        return self._hashes[block] is not None

    def forget(self, block: int) -> None:
        """Make a block unknown: what it holds can't be relied on, or is known elsewhere."""
        if (block_hash := self._hashes[block]) is not None:
            del self._block_of[block_hash]
            self._hashes[block] = None
            if self.ref_counts[block] == 0:
                self._states[block] = _FREE

    def forget_all(self) -> None:
        """Make every block unknown."""
        self._block_of.clear()
        self._hashes = [None] * self.num_blocks
        self._states = self._states.replace(bytes([_CACHED]), bytes([_FREE]))
        self._residency.forget_all()

    def states(self) -> bytes:
        """One byte a block: 0 free, 1 free but its content can be found, 2 owned."""
        return bytes(self._states)

    def check_integrity(self) -> None:
        """Raise AssertionError unless free list, counts and hashes agree. O(num_blocks)."""
        owned = [block for block, count in enumerate(self.ref_counts) if count]
        assert sorted([*self._free, *owned]) == [*range(self.num_blocks)], "a block is free and owned, or neither"
        assert min(self.ref_counts) >= 0, "a block was released too often"
        assert self.num_shared == len(owned) - self.ref_counts.count(1), "shared blocks are miscounted"
        assert {h: b for b, h in enumerate(self._hashes) if h is not None} == self._block_of, "hashes and blocks differ"
        states = bytearray(self.num_blocks)
        for block in (*self._block_of.values(), *owned):
            states[block] = _OWNED if self.ref_counts[block] else _CACHED
        assert states == self._states, "the states of blocks are not what their counts and hashes say"

    def _evict(self, block: int, block_hash: bytes) -> None:
        self.forget(block)
        self.num_evicted += 1
        for tell in self.on_evicted:
            tell((block, block_hash))
        if not block & UNSAMPLED:
            self._residency.on_evicted(block)
