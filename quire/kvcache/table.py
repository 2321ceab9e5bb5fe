"""What the scheduler holds of the KV cache: a sequence's block table, what was found for it, what was added to it.

`KVManager` makes and changes these; the scheduler reads them into its plans. Lists by KV group have one entry a group,
in the order of `CacheLayout.groups`. Nothing here knows how blocks are counted or shared.
"""

import sys
from typing import NamedTuple

NEVER = sys.maxsize  # a number of tokens that no sequence reaches


class Swapped(NamedTuple):
    """A sequence's blocks on the host, which it owns there: those of its first `num_tokens` tokens."""

    num_tokens: int
    block_ids: list[list[int]]  # by group, from the first one on that a window shows


class BlockTable:
    """The blocks of one sequence: block i of a group holds its keys and values of tokens [i * size, (i + 1) * size).

    Attributes:
        sequence_id: whose table it is.
        prompt_token_ids, output_token_ids: the sequence's own lists, read here and never changed.
        root: the name of no tokens at all, see `root_hash`.
        block_ids: by group; empty lists while the sequence does not run. Entries below `first_block` are 0 and mean
            nothing: a window has left them behind.
        first_block: by group, the first index that is held.
        hashes: names of the sequence's first full blocks, as far as they were needed; kept when blocks are freed.
        num_committed: full blocks that were computed, or found, and offered to the prefix cache.
        num_found: full blocks that were found at its admission, on the device or on the host.
        num_slots: positions that every group has a block for, counted from 0.
        next_commit: computed tokens at which `commit` has something to do.
        shared_block: index of the block in which a fork began to differ, to be copied before it is written; -1: none.
        swapped: what the host holds of a sequence that was swapped out.
        fetched: its prefix was asked of the disk; once is enough.
    """

    def __init__(
        self, sequence_id: int, prompt_token_ids: list[int], output_token_ids: list[int], root: bytes, num_groups: int
    ) -> None:
        self.sequence_id, self.root = sequence_id, root
        self.prompt_token_ids, self.output_token_ids = prompt_token_ids, output_token_ids
        self.hashes: list[bytes] = []
        self.swapped: Swapped | None = None
        self.fetched = False
        self.clear(num_groups)

    def clear(self, num_groups: int) -> None:
        """Forget all blocks, as a sequence that does not run."""
        self.block_ids: list[list[int]] = [[] for _ in range(num_groups)]
        self.first_block = [0] * num_groups
        self.num_committed = self.num_found = self.num_slots = 0
        self.next_commit = NEVER
        self.shared_block = -1

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions [start, stop)."""
        border = len(self.prompt_token_ids)
        return self.prompt_token_ids[start:stop] + self.output_token_ids[max(start - border, 0) : max(stop - border, 0)]


class PrefixMatch(NamedTuple):
    """What the cache knows of a sequence's beginning, and whether the block after it is on its way."""

    num_tokens: int  # whole blocks, unless it was swapped out
    # By group, 0 where the window has passed; [] when nothing was looked up. -1 - b: host block b is to be brought in.
    block_ids: list[list[int]]
    awaits: bytes | None = None  # the last block that the sequence computing the first missing one will bring; or None
    num_from_host: int = 0  # blocks to be brought in
    is_swapped: bool = False  # these are the sequence's own


NO_MATCH = PrefixMatch(0, [])


class Appended(NamedTuple):
    """What a step's plan tells the sequence's row; not to be changed."""

    new_block_ids: list[list[int]]  # by group, added to the table's end; [] when there are none in any group
    edits: list[tuple[int, int, int]]  # (group, index, block): the row's table has this block there from now on


NOTHING_APPENDED = Appended([], [])
