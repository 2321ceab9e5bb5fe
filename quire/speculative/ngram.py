"""Drafts by prompt lookup: what followed the same last tokens when they last came, in the prompt or the output.

An index kept with each row has the newest place of every n-gram. Each token enters it once and each draft looks up a
few entries, so that a step costs the same however long the sequence is. Knows no model.
"""

from collections.abc import Sequence
from itertools import cycle, islice

from torch import Tensor

from quire.config.speculative import SpeculativeConfig
from quire.speculative.base import DraftedSequence, Proposer

_BITS = 20  # of a token id in a key; ids beyond would draft in vain, no more


class NgramIndex:
    """Where the n-grams of a growing list of tokens ended last, n from `least` to `most`."""

    __slots__ = ("_ends", "_found", "_key", "token_ids")

    def __init__(self, least: int, most: int) -> None:
        self.token_ids: list[int] = []
        # By n, the shortest first: the bits of a key that count, and from keys to the index after the last token.
        self._ends: list[tuple[int, dict[int, int]]] = [((1 << _BITS * n) - 1, {}) for n in range(least, most + 1)]
        self._key = 0  # the last `most` tokens
        self._found = -1  # the end of what the list ends with, when it was there before

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        known, key, all_ends = self.token_ids, self._key, self._ends
        most = all_ends[-1][0]
        num, found = len(known), -1
        for token_id in token_ids:
            num += 1
            key = (key << _BITS | token_id + 1) & most
            found = -1
            for mask, ends in all_ends:
                part = key & mask
                found = ends.get(part, found)  # the longest counts
                ends[part] = num
        if token_ids:
            self._key, self._found = key, found
        known += token_ids

    def lookup(self, count: int) -> list[int]:
        """At most `count` tokens that followed the longest n-gram that the list ends with; [] if it is new.

        Where they reach the end of the list they go on from its beginning: a text that repeats itself goes on so.
        """
        found, token_ids = self._found, self.token_ids
        return [] if found < 0 else [*islice(cycle(token_ids[found : found + count]), count)]


class NgramProposer(Proposer):
    """Prompt lookup.

    Args:
        config: most drafts of a sequence, and the tokens that an n-gram has; the longest that was there before counts.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self.max_drafts = config.num_speculative_tokens
        self._least, self._most = config.lookup_min, config.lookup_max

    def propose(self, rows: Sequence[DraftedSequence], hidden: Tensor) -> Sequence[Sequence[int]]:
        drafts = []
        for row in rows:
            index: NgramIndex = row.memory or NgramIndex(self._least, self._most)
            row.memory = index
            tokens = row.tokens
            index.extend(tokens.ids[len(index.token_ids) : tokens.num].tolist())
            drafts.append(index.lookup(row.max_drafts))
        return drafts
