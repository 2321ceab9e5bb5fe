"""Tokens of a sequence without a worker's rows."""

from collections.abc import Sequence

import numpy as np

from quire.sampling.tokens import SequenceTokens


def tokens_of(prompt: Sequence[int], output: Sequence[int] = (), room: int = 0) -> SequenceTokens:
    """Tokens in a row of their own, with room for more."""
    ids = np.array([*prompt, *output, *[0] * room], np.int32)
    return SequenceTokens(ids, len(prompt), len(prompt) + len(output))
