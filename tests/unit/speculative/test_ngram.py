"""Prompt lookup against a search of the whole text."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from quire.config.speculative import SpeculativeConfig
from quire.speculative.base import DraftedSequence
from quire.speculative.ngram import NgramIndex, NgramProposer
from tests.tokens import tokens_of


def searched(token_ids: list[int], least: int, most: int, count: int) -> list[int]:
    """What followed the last place of the longest n-gram, by looking everywhere."""
    for n in range(min(most, len(token_ids) - 1), least - 1, -1):
        for start in range(len(token_ids) - n - 1, -1, -1):
            if token_ids[start : start + n] == token_ids[-n:]:
                period = token_ids[start + n :]
                return [period[i % len(period)] for i in range(count)]
    return []


@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_lookup_is_the_search(least: int, most: int) -> None:
    rng = random.Random(least * 10 + most)
    index, token_ids = NgramIndex(least, most), list[int]()
    for _ in range(400):
        new = [rng.randrange(4) for _ in range(rng.randint(1, 3))]
        token_ids += new
        index.extend(new)
        if rng.random() < 0.7:
            count = rng.randint(1, 5)
            assert index.lookup(count) == searched(token_ids, least, most, count)


def test_a_step_costs_the_same_however_long_the_text_is(count_bytecodes: Callable[[Callable[[], Any]], int]) -> None:
    def cost(num_tokens: int) -> int:
        index = NgramIndex(2, 4)
        index.extend([i % 97 for i in range(num_tokens)])
        return count_bytecodes(lambda: (index.extend([1, 2]), index.lookup(4)))

    assert cost(20_000) == cost(200) < 300


def test_the_proposer_reads_rows_as_they_grow() -> None:
    tokens = tokens_of([5, 6, 7, 8, 5, 6], room=8)
    row = DraftedSequence(1, tokens, max_drafts=3)
    proposer = NgramProposer(SpeculativeConfig("ngram", prompt_lookup_min=2, prompt_lookup_max=3))
    nothing = torch.empty(0, 0)
    assert list(proposer.propose([row], nothing)) == [[7, 8, 5]]
    tokens.append(7)
    assert list(proposer.propose([row], nothing)) == [[8, 5, 6]]
    tokens.append(9)
    assert list(proposer.propose([row], nothing)) == [[]]
    assert np.array_equal(tokens.ids[:8], [5, 6, 7, 8, 5, 6, 7, 9])
