"""Names of prefixes: what they are hashed from, and that nothing else has the same name."""

import struct
from hashlib import sha256

from quire.kvcache.prefix import BlockHasher, root_hash


def test_a_block_is_hashed_over_its_parent_and_its_tokens_as_little_endian_int32() -> None:
    root = root_hash(None)
    expected = sha256(root + struct.pack("<4i", 1, 2, 70_000, 2**31 - 1)).digest()
    assert BlockHasher(4)(root, [1, 2, 70_000, 2**31 - 1]) == expected


def test_the_name_depends_on_all_that_came_before() -> None:
    hasher = BlockHasher(2)
    one = hasher(hasher(root_hash(None), [1, 2]), [5, 6])
    other = hasher(hasher(root_hash(None), [2, 1]), [5, 6])
    assert one != other


def test_salts_are_kept_apart() -> None:
    salts = [None, "", "a", "b", "salt:", "\x00", "\ud800"]
    assert len({root_hash(salt) for salt in salts}) == len(salts)
    assert root_hash("a") == root_hash("a")
