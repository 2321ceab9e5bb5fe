"""The proposer asks as many heads as are wanted, once for all sequences."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.config.speculative import SpeculativeConfig
from quire.sampling.state import SamplingState
from quire.sampling.tokens import SequenceTokens
from quire.sampling_params import SamplingParams
from quire.speculative.base import DraftedSequence
from quire.speculative.medusa import HeadRunner, MedusaProposer


class Runner(HeadRunner):
    """Head j drafts 10 i + j for the sequence of seed i, but for 11, which can't be drawn."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def draw(self, hidden: Tensor, states: Sequence[SamplingState], num_heads: int) -> list[int | None]:
        self.calls.append((len(hidden), num_heads))
        self.temperatures = [state.params.temperature for state in states]
        ids = [10 * state.seed + j for state in states for j in range(num_heads)]
        return [None if token_id == 11 else token_id for token_id in ids]

    def rank(
        self, hidden: Tensor, states: Sequence[SamplingState], num_heads: int, num_choices: int
    ) -> list[Sequence[int]]:
        self.calls.append((num_heads, num_choices))
        return [
            [] if state.seed == 9 and j else [100 * state.seed + 10 * j + c for c in range(num_choices)]
            for state in states
            for j in range(num_heads)
        ]


def config(**options: Any) -> SpeculativeConfig:
    return SpeculativeConfig.read({"method": "medusa", "model": "heads"} | options)


def row(number: int, max_drafts: int) -> DraftedSequence:
    params, tokens = SamplingParams(temperature=0.5, n=2, min_tokens=3), SequenceTokens.of([1, 2])
    state = SamplingState(params, tokens, seed=number, sequence_index=0, vocab_size=64)
    return DraftedSequence(number, tokens, state, max_drafts=max_drafts)


def test_each_sequence_gets_as_many_as_it_may_have() -> None:
    runner = Runner()
    proposer = MedusaProposer(config(num_speculative_tokens=4), runner)
    rows = [row(0, 3), row(1, 3), row(2, 1)]
    assert proposer.propose(rows, torch.zeros(3, 8)) == [[0, 1, 2], [10], [20]]
    assert runner.calls == [(3, 3)]
    rows[0].max_drafts, kept = 1, rows[0].memory
    assert proposer.propose(rows[:1], torch.zeros(1, 8)) == [[0]]
    assert runner.calls[1:] == [(1, 1)]
    assert rows[0].memory is kept  # made once for each sequence
    assert runner.temperatures == [0.25]  # sharper than the request's


def test_where_the_typical_is_accepted_the_likeliest_is_drafted() -> None:
    runner = Runner()
    proposer = MedusaProposer(config(acceptance="typical"), runner)
    proposer.propose([row(3, 2)], torch.zeros(1, 8))
    assert runner.temperatures == [0.0]


def test_a_tree_is_filled_with_the_likeliest_of_each_head() -> None:
    runner = Runner()
    proposer = MedusaProposer(config(speculative_token_tree="[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)]"), runner)
    assert proposer.max_drafts == 6
    whole, part, broken = row(1, 6), row(2, 4), row(9, 6)
    drafts = proposer.propose([whole, part, broken], torch.zeros(3, 8))
    assert drafts == [[100, 101, 102, 110, 111, 110], [200, 201, 202, 210], [900, 901, 902]]
    assert proposer.propose([row(1, 2)], torch.zeros(1, 8)) == [[100, 101]]
    assert runner.calls == [(2, 3), (1, 2)]
