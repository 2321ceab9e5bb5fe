"""Drafts by prompt lookup: what followed the same last tokens when they last came, in the prompt or the output.

An index kept with each row has the newest place of every n-gram. Each token enters it once and each draft looks up a
few entries, so that a step costs the same however long the sequence is. Knows no model.
"""

from collections.abc import Sequence

from torch import Tensor

from quire.speculative.base import DraftedSequence, Proposer, Verdict

_MIX = 0x9E3779B97F4A7C15  # an n-gram's key is a polynomial in this, mod 2^61 - 1; a collision drafts in vain, no more
_MODULUS = 2**61 - 1


class NgramIndex:
    """Where the n-grams of a growing list of tokens ended last, n from `least` to `most`."""

    __slots__ = ("_ends", "_least", "_most", "_num_indexed", "token_ids")

    def __init__(self, least: int, most: int) -> None:
        self.token_ids: list[int] = []
        self._least, self._most = least, most
        self._ends: list[dict[int, int]] = [{} for _ in range(most - least + 1)]  # key -> index after its last token
        self._num_indexed = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        self.token_ids += token_ids

    def lookup(self, count: int) -> list[int]:
        """At most `count` tokens that followed the longest n-gram that the list ends with; [] if it is new.

        Where they reach the end of the list they go on from its beginning: a text that repeats itself goes on so.
        """
        token_ids, found = self.token_ids, -1
        # The n-grams that have a successor: the ones that end the list are not among them yet.
        for end in range(max(self._num_indexed + 1, self._least), len(token_ids)):
            for ends, key in zip(self._ends, self._keys(end), strict=False):
                ends[key] = end
        self._num_indexed = max(self._num_indexed, len(token_ids) - 1)
        for ends, key in zip(self._ends, self._keys(len(token_ids)), strict=False):
            end = ends.get(key, -1)
            if end < 0:
                break  # then no longer one was there either
            found = end
        if found < 0:
            return []
        drafts = token_ids[found : found + count]
        while len(drafts) < count:
            drafts += drafts[: count - len(drafts)]
        return drafts

    def _keys(self, end: int) -> list[int]:
        """Of the n-grams that end before `end`, the shortest first."""
        keys, key, token_ids = [], 0, self.token_ids
        for n, place in enumerate(range(end - 1, max(-1, end - 1 - self._most), -1), 1):
            key = (key * _MIX + token_ids[place] + 1) % _MODULUS
            if n >= self._least:
                keys.append(key)
        return keys


class NgramProposer(Proposer):
    """Prompt lookup.

    Args:
        max_drafts: of a sequence.
        least, most: tokens that an n-gram has; the longest that was there before counts.
    """

    uses_hidden = False

    def __init__(self, max_drafts: int, least: int, most: int) -> None:
        self.max_drafts = max_drafts
        self._least, self._most = least, most

    def propose(
        self, rows: Sequence[DraftedSequence], hidden: Tensor, taps: Sequence[Tensor]
    ) -> Sequence[Sequence[int]]:
        drafts = []
        for row in rows:
            index: NgramIndex | None = row.memory
            if index is None:
                index = row.memory = NgramIndex(self._least, self._most)
            tokens = row.tokens
            index.extend(tokens.ids[len(index.token_ids) : tokens.num].tolist())
            drafts.append(index.lookup(row.max_drafts))
        return drafts

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        pass
