"""The names of cached prefixes: SHA-256 hashes chained over blocks of tokens.

The KV manager calls it once for every block of a sequence. A hash stands for the whole prefix up to the end of its
block, and for the extra key that keeps apart requests which must not share. Python's `hash()`, which can be made to
collide, and values chosen by a caller are never used as a name.
"""

import struct
from collections.abc import Sequence
from hashlib import sha256


def root_hash(cache_salt: str | None) -> bytes:
    """The parent of a sequence's first block: a hash of the extra key, 32 bytes.

    Whatever else must keep prefixes apart (an adapter, an image) belongs in here. None and "" are different keys.
    """
    key = b"" if cache_salt is None else b"salt:" + cache_salt.encode("utf-8", "surrogatepass")
    return sha256(b"quire prefix:" + key).digest()


class BlockHasher:
    """Hashes blocks of `block_size` tokens; each block is hashed over its parent's hash and its own tokens."""

    def __init__(self, block_size: int) -> None:
        self._pack = struct.Struct(f"<{block_size}i").pack

    def __call__(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """SHA-256 of parent (32 bytes) and the token ids as little-endian int32."""
        return sha256(parent + self._pack(*token_ids)).digest()
