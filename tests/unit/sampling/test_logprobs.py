"""Log-probabilities and ranks against torch's, and the equalities that clients rely on."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.protocol.step import Failure, TokenLogprobs
from quire.sampling import native, sampler
from quire.sampling.lanes import Draw
from quire.sampling.logprobs import prompt_logprobs
from quire.sampling.sampler import SamplerOutput, rank
from quire.sampling.state import SamplingState
from quire.sampling_params import SamplingParams
from tests.tokens import tokens_of


def sample(logits, states, num_samples) -> SamplerOutput:
    return sampler.sample(logits, [Draw(*of) for of in zip(states, range(len(states)), num_samples, strict=True)])


def make_state(vocab: int, seed: int = 7, **params) -> SamplingState:
    return SamplingState(SamplingParams(**params), tokens_of([1, 2]), seed=seed, sequence_index=0, vocab_size=vocab)


def make_logits(num_rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_the_raw_log_softmax_with_ranks(dtype: torch.dtype) -> None:
    logits = make_logits(4, 3000, dtype=dtype)
    reference = torch.log_softmax(logits.double(), -1)
    states = [make_state(3000, logprobs=5, temperature=0.5, top_k=50, logit_bias={7: 9.0}, seed=s) for s in range(4)]
    output = sample(logits, states, [1] * 4)
    for row in range(4):
        (entry,) = output.logprobs[row] or []
        (token,) = output.token_ids[row]
        assert entry.token_ids[0] == token
        assert len(entry.token_ids) == len(entry.logprobs) == len(entry.ranks) == 6
        assert entry.logprobs == pytest.approx(reference[row, entry.token_ids].tolist(), abs=2e-6)
        assert all(value == float(np.float32(value)) for value in entry.logprobs)
        greater = [(logits[row].float() > logits[row, i].float()).sum().item() for i in entry.token_ids]
        assert entry.ranks == [count + 1 for count in greater]
        order = sorted(range(3000), key=lambda i: (-logits[row, i].item(), i))
        assert entry.token_ids[1:] == order[:5]


def test_a_token_among_the_top_has_the_very_same_number() -> None:
    logits = make_logits(20, 500)
    output = sample(logits, [make_state(500, temperature=0, logprobs=3)] * 20, [1] * 20)
    for entries in output.logprobs:
        entry: TokenLogprobs = (entries or [])[0]
        assert (entry.token_ids[0], entry.logprobs[0], entry.ranks[0]) == (entry.token_ids[1], entry.logprobs[1], 1)


def test_numbers_of_logprobs_none_zero_all_and_too_many() -> None:
    logits = make_logits(1, 30)
    for asked, given in [(0, 0), (2, 2), (-1, 30), (400, 30)]:
        entries = sample(logits, [make_state(30, logprobs=asked)], [1]).logprobs[0]
        assert entries is not None
        assert len(entries[0].token_ids) == 1 + given
        assert sum(map(math.exp, entries[0].logprobs[1:])) == pytest.approx(1.0) or given < 30
    assert sample(logits, [make_state(30)], [1]).logprobs == [None]


def test_tied_logits_share_a_rank_and_come_by_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0]])
    (entry,) = prompt_logprobs(logits, [4], 5)
    assert entry.token_ids == [4, 1, 3, 2, 4, 5]
    assert entry.ranks == [3, 1, 1, 3, 3, 3]


def test_masked_raw_logits_have_minus_infinity() -> None:
    logits = torch.full((1, 9), -math.inf)
    logits[0, 4] = 2.0
    (entry,) = prompt_logprobs(logits, [0], 3)
    assert entry == TokenLogprobs([0, 4, 0, 1], [-math.inf, 0.0, -math.inf, -math.inf], [2, 1, 2, 2])
    (entry,) = prompt_logprobs(torch.full((1, 9), math.nan), [3], 2)
    assert entry == TokenLogprobs([3, 0, 1], [-math.inf] * 3, [1, 1, 1])


def test_prompt_logprobs_have_the_bits_of_sampled_ones() -> None:
    logits = make_logits(6, 9000, dtype=torch.bfloat16)
    states = [make_state(9000, logprobs=4, seed=row) for row in range(6)]
    output = sample(logits, states, [1] * 6)
    targets = [tokens[0] for tokens in output.token_ids]
    assert prompt_logprobs(logits, targets, 4) == [(entries or [])[0] for entries in output.logprobs]
    assert prompt_logprobs(logits[[3]], targets[3:4], 4) == output.logprobs[3]


@pytest.mark.parametrize("top", [2, -1])  # the compiled sampler has no -1
def test_an_id_beyond_the_vocabulary_comes_after_all_others(top: int) -> None:
    logits = make_logits(2, 9)
    beyond, known = prompt_logprobs(logits, [9, 3], top)
    assert (beyond.token_ids[0], beyond.logprobs[0], beyond.ranks[0]) == (9, -math.inf, 10)
    assert beyond.token_ids[1:] == prompt_logprobs(logits[:1], [0], top)[0].token_ids[1:]
    assert known == prompt_logprobs(logits[1:], [3], top)[0]


def test_no_rows() -> None:
    assert prompt_logprobs(torch.zeros(0, 9), [], 3) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_sampler_ranks_alike(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates of several rows at once, from any rows: ties, masked tokens, rows that can't be sampled."""
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(5)).to(dtype)
    logits[1, 40:60] = 7.0
    logits[2, 3:] = -math.inf
    logits[3, 9] = math.nan
    logits[4, :] = -math.inf
    params = [SamplingParams(temperature=0, allowed_token_ids=[5, 9, 40] if i == 5 else None) for i in range(6)]
    states = [SamplingState(one, tokens_of([1], room=4), seed=0, sequence_index=0, vocab_size=300) for one in params]
    rows = [[0, 1, 2, 3, 4, 5], [5, 3, 0], [1]]
    draws = [[Draw(states[i], i, num) for i, num in zip(some, [8, 3, 12, 1, 4, 6], strict=False)] for some in rows]
    found = [rank(logits, one) for one in draws]
    monkeypatch.setattr(native, "library", lambda: None)
    assert found == [rank(logits, one) for one in draws]
    assert [len(one.token_ids) for one in found[0] if isinstance(one, TokenLogprobs)] == [8, 3, 3, 3]
    assert [type(one) for one in found[0]].count(Failure) == 2
