"""The names of cached prefixes, SHA-256 hashes chained over blocks of tokens, and the search for the longest one.

The KV manager names every block of a sequence once, for all groups. A hash stands for the whole prefix up to the end
of its block, and for the extra key that keeps apart requests which must not share. Python's `hash()`, which can be
made to collide, and values chosen by a caller are never used as a name.
"""

import struct
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import accumulate

from quire.kvcache.groups import KVGroup


def root_hash(cache_salt: str | None, adapter_digest: bytes = b"") -> bytes:
    """The parent of a sequence's first block: a hash of what keeps equal tokens apart, 32 bytes.

    None and "" are different salts. `adapter_digest` is that of an adapter's weights, empty without one.
    """
    key = b"" if cache_salt is None else b"salt:" + cache_salt.encode("utf-8", "surrogatepass")
    root = sha256(b"quire prefix:" + key).digest()
    return sha256(b"quire adapter:" + root + adapter_digest).digest() if adapter_digest else root


class BlockHasher:
    """Hashes blocks of `block_size` tokens; each block is hashed over its parent's hash and its own tokens."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._pack = struct.Struct(f"<{block_size}i").pack

    def __call__(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """SHA-256 of parent (32 bytes) and the token ids as little-endian int32."""
        return sha256(parent + self._pack(*token_ids)).digest()

    def names(self, root: bytes, token_ids: Sequence[int]) -> list[bytes]:
        """The names of all full blocks of a prompt."""
        size = self.block_size
        blocks = (token_ids[start : start + size] for start in range(0, len(token_ids) // size * size, size))
        return list(accumulate(blocks, self, initial=root))[1:]


def longest_prefix(
    groups: Sequence[KVGroup],
    name_of: Callable[[int], bytes],
    num_blocks: int,
    lookups: Sequence[Callable[[bytes], bool]] = (),
) -> int:
    """How many of a sequence's first `num_blocks` blocks need not be computed again.

    So many that every full group holds them all, and every windowed one those that later positions still see. A block
    is looked up once in each group, and named only when it is looked up: by `lookups`, one a group, or in the pools.
    """
    holds = dict(zip(groups, lookups or [group.pool.holds for group in groups], strict=True))
    for group in groups:
        if group.window is None:
            found = 0
            while found < num_blocks and holds[group](name_of(found)):
                found += 1
            num_blocks = found
    # Windows: from the end, as the last gap is what decides. Blocks [known[group], num_blocks) are there.
    windowed = [group for group in groups if group.window is not None]
    known = dict.fromkeys(windowed, num_blocks)
    waiting = list(windowed)
    while num_blocks and waiting:
        group = waiting.pop()
        index = min(known[group], num_blocks)
        first = group.first_visible(num_blocks * group.block_size)
        while index > first and holds[group](name_of(index - 1)):
            index -= 1
        known[group] = index
        if index > first:
            num_blocks = index - 1
            waiting = list(windowed)
    return num_blocks
