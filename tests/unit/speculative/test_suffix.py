"""The suffix automaton against a search of the whole text, and what the proposer makes of it."""

import random

import pytest
import torch

from quire.config.speculative import SpeculativeConfig
from quire.speculative.base import DraftedSequence
from quire.speculative.suffix import SuffixAutomaton, SuffixProposer
from tests.tokens import tokens_of

NOTHING = torch.empty(0, 0)


def proposer_of(max_cached: int) -> SuffixProposer:
    config = SpeculativeConfig("suffix", num_speculative_tokens=8, suffix_decoding_max_cached_requests=max_cached)
    return SuffixProposer(config)


def ends_of(token_ids: list[int], part: list[int]) -> list[int]:
    return [e for e in range(len(part), len(token_ids) + 1) if token_ids[e - len(part) : e] == part]


def longest_repeated(token_ids: list[int]) -> int:
    return next(
        n
        for n in range(len(token_ids) - 1, -1, -1)
        if len(ends_of(token_ids, token_ids[len(token_ids) - n :])) > 1 or not n
    )


@pytest.mark.parametrize("num_symbols", [2, 3, 6])
def test_the_longest_repeated_suffix(num_symbols: int) -> None:
    rng, automaton = random.Random(num_symbols), SuffixAutomaton()
    for _ in range(120):
        automaton.append(rng.randrange(num_symbols))
        length, end = automaton.repeated()
        token_ids = automaton.token_ids
        assert length == longest_repeated(token_ids)
        assert not length or end in ends_of(token_ids, token_ids[-length:])[:-1]


def test_a_text_is_followed_in_one_that_grows() -> None:
    rng, automaton, text = random.Random(1), SuffixAutomaton(), list[int]()
    state = length = 0
    for _ in range(150):
        for _ in range(rng.randrange(3)):
            automaton.append(rng.randrange(3))
        before = automaton.token_ids
        text.append(rng.randrange(3))
        state, length = automaton.follow(state, length, text[-1])
        longest = next(n for n in range(len(text), -1, -1) if not n or ends_of(before, text[-n:]))
        # What was too short when it was matched may have come since; what is claimed is there.
        assert length <= longest
        assert not length or automaton.ends[state] in ends_of(before, text[-length:])


def drafts(proposer: SuffixProposer, row: DraftedSequence) -> list[int]:
    row.max_drafts = proposer.max_drafts
    return list(proposer.propose([row], NOTHING)[0])


def test_more_is_drafted_the_longer_the_suffix_is() -> None:
    tokens = tokens_of([1, 2, 3, 4, 5, 6, 7, 8, 1], room=8)
    row, proposer = DraftedSequence(1, tokens), proposer_of(0)
    assert drafts(proposer, row) == []
    tokens.append(2)
    assert drafts(proposer, row) == [3, 4]
    tokens.append(3)
    assert drafts(proposer, row) == [4, 5, 6]


def test_past_outputs_are_searched_where_asked() -> None:
    done = DraftedSequence(1, tokens_of([1], [10, 11, 12, 13, 14, 15]))
    salted = DraftedSequence(2, tokens_of([1], [10, 11, 12, 99]), shares=False)
    fresh = tokens_of([2], [10, 11, 12], room=4)
    for max_cached, expected in ((0, []), (10, [13, 14, 15])):
        proposer = proposer_of(max_cached)
        for row in (done, salted):
            row.memory = None
            drafts(proposer, row)
            proposer.forget(row)
        assert drafts(proposer, DraftedSequence(3, fresh)) == expected
        assert drafts(proposer, DraftedSequence(4, fresh, shares=False)) == []


def test_past_outputs_stay_within_their_bound() -> None:
    proposer = proposer_of(4)
    for i in range(50):
        proposer.forget(DraftedSequence(i, tokens_of([0], list(range(100 * i, 100 * i + 20)))))
        assert len(proposer._past.token_ids) <= 2 * 4 * 21
    row = DraftedSequence(99, tokens_of([0], [4903, 4904], room=2))
    assert drafts(proposer, row) == [4905, 4906]
    row = DraftedSequence(98, tokens_of([0], [103, 104], room=2))
    assert drafts(proposer, row) == []
