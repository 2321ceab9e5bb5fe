"""Random numbers from a counter, so that a draw depends on nothing but (seed, sequence, position).

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Called by the
sampler once per drawn token, and where drafts are judged. Holds no state: no stream to save at preemption, none to
share between requests.
"""

Words = tuple[int, int, int, int]  # each below 2**32

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio, sqrt(3) - 1: the paper's Weyl constants
_ROUNDS = 10
# What bits are for, where not for the sampler's own draw: added to `attempt`, so that no two draws share any.
DRAFT, ACCEPT, RECOVER = 1 << 30, 2 << 30, 3 << 30


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Four random 32-bit words for a 128-bit counter and a 64-bit key, both as 32-bit words, lowest first."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    m0, m1 = _MULTIPLIERS
    s0, s1 = _KEY_STEPS
    for _ in range(_ROUNDS):
        p0, p1 = m0 * c0, m1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK32
        k0, k1 = (k0 + s0) & _MASK32, (k1 + s1) & _MASK32
    return c0, c1, c2, c3


def random_bits(seed: int, sequence_index: int, position: int, attempt: int = 0) -> int:
    """64 random bits for the token at `position` (0 = first output token) of a request's sequence.

    All 64 bits of `seed` (negative ones modulo 2**64) and of `sequence_index` count, and 32 of `position` and of
    `attempt`, which numbers the draws for one position and says what for.
    """
    seed &= _MASK64
    counter = (position, attempt, sequence_index & _MASK32, sequence_index >> 32)
    low, high, _, _ = philox4x32(counter, (seed & _MASK32, seed >> 32))
    return high << 32 | low
