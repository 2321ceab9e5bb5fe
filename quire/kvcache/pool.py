"""The pool of KV blocks: reference counts, the list of free blocks, and which block holds which content.

The KV manager is its only caller. A block is a number, and all state lives in flat lists, so that a pool of 100,000
blocks costs the garbage collector nothing. It must not know of sequences, tokens or tensors.
"""


class BlockPool:
    """Blocks 0 .. num_blocks - 1, each owned by ``ref_counts[block]`` block tables; a block with no owner is free.

    A free block may still hold content that a hash leads to. The free list is circular and doubly linked through a
    sentinel; blocks are taken at its front, where those without a hash stand; those with one are appended at its end
    when freed, so that the least recently used content goes first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._sentinel = num_blocks
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks (there must be as many) for one owner each, forgetting what they held."""
        assert count <= self.num_free, "allocate() without looking at num_free"
        block = self._next[self._sentinel]
        taken = []
        for _ in range(count):
            taken.append(block)
            self.ref_counts[block] = 1
            self._forget(block)
            block = self._next[block]
        self._next[self._sentinel] = block
        self._previous[block] = self._sentinel
        self.num_free -= count
        return taken

    def acquire(self, block: int) -> None:
        """Add an owner to a block, free or not."""
        if self.ref_counts[block] == 0:
            self._unlink(block)
            self.num_free -= 1
        self.ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Drop an owner of a block; without any left it is free."""
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            # Before the sentinel is the end of the list, before the first block its front.
            end = self._sentinel
            self._link_before(end if self._hashes[block] is not None else self._next[end], block)
            self.num_free += 1

    def find(self, block_hash: bytes) -> int | None:
        """The block that holds this content, or None."""
        return self._block_of.get(block_hash)

    def register(self, block: int, block_hash: bytes) -> None:
        """Make an owned block findable by the hash of its content.

        One hash leads to one block: where another one in use holds the same content already, this one stays unknown;
        where that one is free, this one, which was used later, takes its place.
        """
        assert self.ref_counts[block] > 0, "registering a free block"
        assert self._hashes[block] is None, "a block has one content"
        held = self._block_of.get(block_hash)
        if held is not None:
            if self.ref_counts[held] > 0:
                return
            self._forget(held)
            self._unlink(held)
            self._link_before(self._next[self._sentinel], held)
        self._block_of[block_hash] = block
        self._hashes[block] = block_hash

    def is_registered(self, block: int) -> bool:
        """Whether a hash leads to this block."""
        return self._hashes[block] is not None

    def forget_all(self) -> None:
        """Make every block unknown."""
        self._block_of.clear()
        self._hashes = [None] * self.num_blocks

    def states(self) -> bytes:
        """One byte a block: 0 free, 1 free but its content can be found, 2 owned."""
        pairs = zip(self.ref_counts, self._hashes, strict=True)
        return bytes(2 if count else block_hash is not None for count, block_hash in pairs)

    def check_integrity(self) -> None:
        """Raise AssertionError unless free list, counts and hashes agree. O(num_blocks)."""
        free = []
        previous, block = self._sentinel, self._next[self._sentinel]
        while block != self._sentinel:
            assert self._previous[block] == previous, f"free list broken at block {block}"
            assert len(free) < self.num_blocks, "the free list has a loop"
            free.append(block)
            previous, block = block, self._next[block]
        assert self._previous[self._sentinel] == previous, "free list broken at its end"
        assert len(free) == self.num_free, f"{len(free)} blocks in the free list, {self.num_free} counted"
        unowned = [block for block, count in enumerate(self.ref_counts) if count == 0]
        assert sorted(free) == unowned, "the free blocks are not those without an owner"
        assert min(self.ref_counts) >= 0, "a block was released too often"
        hashed = {block_hash: block for block, block_hash in enumerate(self._hashes) if block_hash is not None}
        assert hashed == self._block_of, "blocks and hashes disagree"

    def _forget(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hashes[block] = None

    def _link_before(self, successor: int, block: int) -> None:
        previous = self._previous[successor]
        self._next[previous] = self._previous[successor] = block
        self._previous[block] = previous
        self._next[block] = successor

    def _unlink(self, block: int) -> None:
        previous, successor = self._previous[block], self._next[block]
        self._next[previous] = successor
        self._previous[successor] = previous
