"""The proposer asks as many heads as are wanted, once for all sequences."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.config.speculative import SpeculativeConfig
from quire.sampling.state import SamplingState
from quire.sampling_params import SamplingParams
from quire.speculative.base import DraftedSequence
from quire.worker.drafting import drafting_state
from quire.worker.medusa import MedusaProposer
from tests.tokens import tokens_of

VOCAB_SIZE = 128


class Heads:
    """Head j thinks 10 i + j the likeliest for the hidden state i, then those after it; some heads of others fail."""

    def __init__(self, broken: Collection[tuple[int, int]] = ()) -> None:
        self.broken = broken
        self.calls: list[tuple[int, int]] = []

    def logits(self, hidden: Tensor, num_heads: int) -> Tensor:
        self.calls.append((len(hidden), num_heads))
        found = torch.empty(len(hidden) * num_heads, VOCAB_SIZE)
        for row, i in enumerate(hidden[:, 0].int().tolist()):
            for j in range(num_heads):
                likeliest = torch.arange(VOCAB_SIZE).roll(10 * i + j)
                found[row * num_heads + j] = -100.0 * likeliest
                if (i, j) in self.broken:
                    found[row * num_heads + j] = float("nan")
        return found


def proposer_of(heads: Heads, **options: Any) -> MedusaProposer:
    return MedusaProposer(config(**options), heads.logits, None)


def hidden_of(rows: Sequence[DraftedSequence]) -> Tensor:
    return torch.tensor([[float(row.sequence_id)] * 8 for row in rows])


def temperature(row: DraftedSequence) -> float:
    return drafting_state(row).params.temperature


def config(**options: Any) -> SpeculativeConfig:
    return SpeculativeConfig.read({"method": "medusa", "model": "heads"} | options)


def row(number: int, max_drafts: int) -> DraftedSequence:
    params, tokens = SamplingParams(temperature=0.5, n=2, min_tokens=3), tokens_of([1, 2])
    state = SamplingState(params, tokens, seed=number, sequence_index=0, vocab_size=VOCAB_SIZE)
    return DraftedSequence(number, tokens, state, max_drafts=max_drafts)


def test_each_sequence_gets_as_many_as_it_may_have() -> None:
    heads = Heads(broken={(1, 1)})
    proposer = proposer_of(heads, num_speculative_tokens=4)
    rows = [row(0, 3), row(1, 3), row(2, 1)]
    assert proposer.propose(rows, hidden_of(rows)) == [[0, 1, 2], [10], [20]]
    assert heads.calls == [(3, 3)]
    rows[0].max_drafts, kept = 1, rows[0].plain_state
    assert proposer.propose(rows[:1], hidden_of(rows[:1])) == [[0]]
    assert heads.calls[1:] == [(1, 1)]
    assert rows[0].plain_state is kept is not None  # made once for each sequence
    assert temperature(rows[0]) == 0.25  # sharper than the request's


def test_where_the_typical_is_accepted_the_likeliest_is_drafted() -> None:
    rows = [row(3, 2)]
    proposer_of(Heads(), acceptance="typical").propose(rows, hidden_of(rows))
    assert temperature(rows[0]) == 0.0


def test_a_tree_is_filled_with_the_likeliest_of_each_head() -> None:
    heads = Heads(broken={(9, 1)})
    proposer = proposer_of(heads, speculative_token_tree="[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)]")
    assert proposer.max_drafts == 6
    rows = [row(1, 6), row(2, 4), row(9, 6)]
    assert proposer.propose(rows, hidden_of(rows)) == [[10, 11, 12, 11, 12, 11], [20, 21, 22, 21], [90, 91, 92]]
    assert proposer.propose([row(1, 2)], hidden_of(rows[:1])) == [[10, 11]]
    assert heads.calls == [(3, 2), (1, 1)]
