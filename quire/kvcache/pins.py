"""Pinned prefixes: beginnings of prompts whose blocks stay, whoever else wants blocks.

The scheduler pins and unpins, and a reset of the prefix cache ends all pins. Their blocks are owned here, within a
share of each pool and never so many that the longest request could not run any more. It must not know of sequences.
"""

from collections import Counter
from collections.abc import Sequence

from quire.errors import InvalidRequestError
from quire.kvcache.groups import KVGroup
from quire.kvcache.prefix import BlockHasher, longest_prefix, root_hash
from quire.protocol.cache import PinnedPrefix

MOST_PINNED = 0.5  # of each group's blocks


class Pins:
    """The pinned prefixes by name; blocks that several of them share are owned by each and counted once."""

    def __init__(self, groups: Sequence[KVGroup], hasher: BlockHasher | None, longest: int) -> None:
        """No `hasher`: nothing is cached. `longest`: tokens of the longest request, which must fit beside all pins."""
        self._groups, self._hasher, self._longest = groups, hasher, longest
        self._pinned: dict[str, tuple[PinnedPrefix, list[list[int]]]] = {}

    @property
    def num_blocks(self) -> list[int]:
        """By group: blocks that are pinned."""
        return [len(group.pinned) for group in self._groups]

    def add(self, name: str, token_ids: list[int], cache_salt: str | None = None) -> PinnedPrefix:
        """Keep a prompt's full blocks, all of which must be cached, until they are unpinned or everything is forgotten.

        Raises:
            InvalidRequestError: something of it is not cached, the name is in use, or it would be too much; nothing is
                pinned then.
        """
        if name in self._pinned:
            raise InvalidRequestError(f"a prefix {name!r} is pinned already; unpin it, or choose another name.", "name")
        block_ids, num_tokens = self._find(token_ids, cache_salt)
        prefix = PinnedPrefix(name, num_tokens, sum(map(len, block_ids)))
        self._pinned[name] = (prefix, block_ids)
        for group, blocks in zip(self._groups, block_ids, strict=True):
            for block in blocks:
                group.pool.acquire(block)
            group.pinned.update(blocks)
        try:
            self._check_room()
        except InvalidRequestError:
            self.remove(name)
            raise
        return prefix

    def remove(self, name: str) -> bool:
        """Give a prefix's blocks back, its end first; what they hold stays findable. False: there is none."""
        if name not in self._pinned:
            return False
        _, block_ids = self._pinned.pop(name)
        for group, blocks in zip(self._groups, block_ids, strict=True):
            group.pool.release_all(blocks)
            group.pinned -= Counter(blocks)
        return True

    def remove_all(self) -> None:
        """End all pins."""
        for name in list(self._pinned):
            self.remove(name)

    def listed(self) -> list[PinnedPrefix]:
        """All of them, in the order in which they were pinned."""
        return [prefix for prefix, _ in self._pinned.values()]

    def _find(self, token_ids: list[int], cache_salt: str | None) -> tuple[list[list[int]], int]:
        """The cached blocks of a prompt by group, and how many of its tokens they are for."""
        if self._hasher is None:
            raise InvalidRequestError("nothing can be pinned without enable_prefix_caching.", "prompt")
        size = self._hasher.block_size
        names = self._hasher.names(root_hash(cache_salt), token_ids)
        if not names:
            message = f"the prompt has {len(token_ids)} tokens, less than a KV block ({size}); pin a longer one."
            raise InvalidRequestError(message, "prompt")
        if longest_prefix(self._groups, names.__getitem__, len(names)) < len(names):
            raise InvalidRequestError("the prefix is not in the KV cache any more; try again when less runs.", "prompt")
        found = []
        for group in self._groups:
            # From where one sees that has to compute the last of these blocks, as the prompt itself would.
            first, find = group.first_visible((len(names) - 1) * size), group.pool.find
            found.append([block for name in names[first:] if (block := find(name)) is not None])
        return found, len(names) * size

    def _check_room(self) -> None:
        for group in self._groups:
            most, num_pinned = int(group.pool.num_blocks * MOST_PINNED), len(group.pinned)
            if num_pinned > most:
                raise InvalidRequestError(
                    f"with this prefix {num_pinned} of {group.pool.num_blocks} KV blocks would be pinned, and at "
                    f"most {most} may be; unpin another one, or pin a shorter one.",
                    "prompt",
                )
            if group.max_tokens() < self._longest:
                raise InvalidRequestError(
                    f"with {num_pinned} of {group.pool.num_blocks} KV blocks pinned, a request of "
                    f"{self._longest} tokens could not run any more; lower max_model_len, give the KV cache more "
                    "memory, or pin a shorter prefix.",
                    "prompt",
                )
