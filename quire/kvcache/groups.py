"""One KV group's rules: how many blocks a sequence has there, and which of them a window has left behind.

The KV manager keeps one `KVGroup` for each group of the layout. A group of full attention holds all of a sequence's
blocks; a windowed one takes them as it goes and frees those that no query to come can touch. Knows no tokens or names.
"""

from collections import Counter

from quire.kvcache.pool import BlockPool
from quire.kvcache.residency import ResidencyTimes
from quire.kvcache.table import NEVER

KEY_TILE = 64  # tokens; kernels read a window's keys from the beginning of such a tile


def window_reach(window: int, block_size: int) -> int:
    """Tokens before its next one that a long sequence holds at most, where the window begins least favourably."""
    return window - 1 + KEY_TILE - 1 + (block_size - 1 if KEY_TILE % block_size else 0)


class KVGroup:
    """The blocks of layers that share one table.

    Attributes:
        pool: the group's blocks.
        window: tokens that a query sees, itself included; None: all before it.
        block_size: tokens in a block.
        pinned: blocks that no sequence can have, and how many pins have each; see `Pins`.
    """

    def __init__(self, num_blocks: int, block_size: int, window: int | None, times: ResidencyTimes | None) -> None:
        self.pool = BlockPool(num_blocks, times)
        self.window, self.block_size = window, block_size
        self.pinned = Counter[int]()

    def first_visible(self, num_computed_tokens: int) -> int:
        """Index of the first block that a query at position num_computed_tokens, or a later one, may touch."""
        if self.window is None or num_computed_tokens < self.window:
            return 0
        return (num_computed_tokens - self.window + 1) // KEY_TILE * KEY_TILE // self.block_size

    def release_at(self, first_block: int) -> int:
        """Computed tokens of a sequence at which this block of it has fallen out of the window."""
        if self.window is None:
            return NEVER
        border = -(-(first_block + 1) * self.block_size // KEY_TILE) * KEY_TILE
        return border + self.window - 1

    def num_admitted(self, num_tokens: int, num_step_tokens: int) -> int:
        """Entries of a table at its admission: for all known tokens, or those that the first step ends with."""
        return -(-(num_tokens if self.window is None else num_step_tokens) // self.block_size)

    def max_tokens(self) -> int:
        """Tokens of the longest sequence that can run here by itself."""
        num_tokens = (self.pool.num_blocks - len(self.pinned)) * self.block_size
        # Beyond what a window shows, the next token at least must have a place.
        if self.window is not None and num_tokens > window_reach(self.window, self.block_size):
            return NEVER
        return num_tokens

    def num_free_among(self, block_ids: list[int]) -> int:
        """How many of some blocks nobody owns; negative numbers stand for blocks elsewhere."""
        counts = self.pool.ref_counts
        return sum(1 for block in block_ids if block >= 0 and counts[block] == 0)
