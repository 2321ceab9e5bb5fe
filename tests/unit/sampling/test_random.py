"""Philox against its paper's vectors, and what keys its numbers."""

import numpy as np

from quire.sampling.random import philox4x32, random_bits

# Known answers of Philox4x32-10 from the authors' Random123 distribution: counter, key, result.
_FULL = 0xFFFFFFFF
_KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((_FULL,) * 4, (_FULL,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def test_philox_gives_the_known_answers() -> None:
    for counter, key, result in _KNOWN:
        assert philox4x32(counter, key) == result


def test_every_bit_of_the_key_counts() -> None:
    keys = [(1 << bit, 0, 0, 0) for bit in range(64)]
    keys += [(0, 1 << bit, 0, 0) for bit in range(64)]
    keys += [(0, 0, 1 << bit, 0) for bit in range(32)]
    keys += [(0, 0, 0, 1 << bit) for bit in range(32)]
    assert len({random_bits(*key) for key in [(0, 0, 0, 0), *keys]}) == len(keys) + 1
    assert random_bits(-5, 0, 0) == random_bits(2**64 - 5, 0, 0)


def test_bits_are_uniform() -> None:
    values = [random_bits(11, 0, position) for position in range(20_000)]
    for shift in (0, 30, 60):  # low, middle and top four bits
        counts = np.bincount([value >> shift & 15 for value in values], minlength=16)
        chi_square = float(((counts - 1250) ** 2 / 1250).sum())
        assert chi_square < 45  # 15 degrees of freedom: 1 in 10,000
