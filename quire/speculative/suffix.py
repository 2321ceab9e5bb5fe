"""Drafts by suffix automaton: what followed the longest suffix of the text that came before, here or in past outputs.

The automaton of a sequence grows by each token once, in constant time on the average, and always knows the longest
suffix that occurred earlier. The longer that is, the more is drafted. Knows no model.
"""

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from quire.config.speculative import SpeculativeConfig
from quire.speculative.base import DraftedSequence, Proposer

_SEPARATOR = -1
_LEAST_LENGTH = 2  # of a suffix; what follows a lone token is anyone's guess
_MAX_CACHED_TOKENS = 2**18  # of past outputs; a token takes about half a kilobyte


class SuffixAutomaton:
    """All substrings of a growing list of tokens.

    A state stands for substrings with the same ends; `_lengths` has the longest one's length, `_links` the state of the
    longest suffix with more ends, `ends` the index after one of their latest places.
    """

    __slots__ = ("_last", "_lengths", "_links", "_next", "ends", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._links, self._lengths, self.ends = [-1], [0], [0]
        self._last = 0

    def append(self, token_id: int) -> None:
        """Append a token; amortized constant time."""
        self.token_ids.append(token_id)
        following, links, lengths = self._next, self._links, self._lengths
        last = self._last
        new = self._add({}, lengths[last] + 1, 0, len(self.token_ids))
        state = last
        while state >= 0 and token_id not in following[state]:
            following[state][token_id] = new
            state = links[state]
        if state >= 0:
            other = following[state][token_id]
            if lengths[other] == lengths[state] + 1:
                links[new] = other
            else:
                copy = self._add(following[other].copy(), lengths[state] + 1, links[other], self.ends[other])
                while state >= 0 and following[state].get(token_id) == other:
                    following[state][token_id] = copy
                    state = links[state]
                links[other] = links[new] = copy
        self._last = new

    def repeated(self) -> tuple[int, int]:
        """Length of the longest suffix that occurs earlier as well, and the index after that occurrence."""
        state = self._links[self._last]
        if state <= 0:
            return 0, 0
        end = self.ends[state]
        self.ends[state] = len(self.token_ids)  # the next time, this one is the latest
        return self._lengths[state], end

    def follow(self, state: int, length: int, token_id: int) -> tuple[int, int]:
        """Append a token to a text that is matched against this one: the state and length of its longest suffix."""
        while state and length <= self._lengths[self._links[state]]:  # the state has been split meanwhile
            state = self._links[state]
        while state and token_id not in self._next[state]:
            state = self._links[state]
            length = self._lengths[state]
        found = self._next[state].get(token_id)
        return (0, 0) if found is None else (found, length + 1)

    def _add(self, following: dict[int, int], length: int, link: int, end: int) -> int:
        self._next.append(following)
        self._lengths.append(length)
        self._links.append(link)
        self.ends.append(end)
        return len(self._links) - 1


class _Memory:
    """A row's own automaton, and where it stands in that of past outputs."""

    __slots__ = ("generation", "length", "own", "state")

    def __init__(self) -> None:
        self.own = SuffixAutomaton()
        self.state = self.length = self.generation = 0


class SuffixProposer(Proposer):
    """Suffix decoding.

    Args:
        config: most drafts of a sequence, and for each token of the suffix that was found; past outputs to be searched.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self.max_drafts = config.num_speculative_tokens
        self._factor = config.suffix_decoding_max_spec_factor
        self._past = SuffixAutomaton()
        self._outputs: deque[list[int]] = deque(maxlen=config.suffix_decoding_max_cached_requests)
        self._num_added = self._generation = 0

    def propose(self, rows: Sequence[DraftedSequence], hidden: Tensor) -> Sequence[Sequence[int]]:
        return [self._drafts(row) for row in rows]

    def forget(self, row: DraftedSequence) -> None:
        if not self._outputs.maxlen or not row.shares or not (output := row.tokens.output()):
            return
        self._outputs.append(output)
        self._num_added += 1
        if self._num_added > 2 * self._outputs.maxlen or len(self._past.token_ids) > _MAX_CACHED_TOKENS:
            # Made anew of the newer half, so that it stays within its bounds at a constant price a token.
            num_kept = min(self._outputs.maxlen, max(1, len(self._outputs) // 2))
            while len(self._outputs) > num_kept:
                self._outputs.popleft()
            self._past, self._generation, self._num_added = SuffixAutomaton(), self._generation + 1, num_kept
            for kept in self._outputs:
                self._remember(kept)
        else:
            self._remember(output)

    def _remember(self, output: list[int]) -> None:
        for token_id in (*output, _SEPARATOR):
            self._past.append(token_id)

    def _drafts(self, row: DraftedSequence) -> list[int]:
        memory: _Memory = row.memory or _Memory()
        row.memory = memory
        tokens, own, past = row.tokens, memory.own, self._past
        new = tokens.ids[len(own.token_ids) : tokens.num].tolist()
        length = end = 0
        for token_id in new:  # each time, so that what is found follows from the tokens alone
            own.append(token_id)
            length, end = own.repeated()
        token_ids = own.token_ids
        if past.token_ids and row.shares:  # who gives nothing takes nothing: what is drafted shows in the time it takes
            if memory.generation != self._generation:
                memory.generation, memory.state, memory.length = self._generation, 0, 0
                new = own.token_ids[-64:]
            for token_id in new:
                memory.state, memory.length = past.follow(memory.state, memory.length, token_id)
            if memory.length > length:
                length, end, token_ids = memory.length, past.ends[memory.state], past.token_ids
        count = min(row.max_drafts, int(length * self._factor))
        if length < _LEAST_LENGTH or count <= 0:
            return []
        drafts = token_ids[end : end + count]
        if _SEPARATOR in drafts:
            del drafts[drafts.index(_SEPARATOR) :]
        return drafts
