"""Drafts judged by a rule: the distribution that comes of it, and that a lane's outcome is its own."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from chi_square import ChiSquare, target
from torch import Tensor

from quire.protocol.step import FailureKind
from quire.sampling import accept
from quire.sampling.accept import Rule, draw_drafts, judge_lanes
from quire.sampling.lanes import Draw, Lane
from quire.sampling.logprobs import prompt_logprobs
from quire.sampling.sampler import sample
from quire.sampling.state import SamplingState
from quire.sampling_params import SamplingParams
from tests.tokens import tokens_of

V = 24
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 9, "min_p": 0.02},
    {"temperature": 0.9, "presence_penalty": 1.5, "frequency_penalty": 0.7},
]


def rows(seed: int, num: int, size: int = V) -> Tensor:
    return torch.randn(num, size, generator=torch.Generator().manual_seed(seed)) * 1.5


def lane_of(
    params: SamplingParams, seed: int, first_row: int = 0, drafts: Sequence[int] = (), computed: int = -1
) -> Lane:
    """One with the output [5, 5, 7] so far."""
    tokens = tokens_of([1, 2], [5, 5, 7], room=12)
    tokens.set_drafts(list(drafts))
    state = SamplingState(params, tokens, seed=seed, sequence_index=0, vocab_size=V)
    return Lane(state, first_row, num_drafts=len(drafts) if computed < 0 else computed)


def drafting(lane: Lane, q_logits: Tensor) -> None:
    """Draft as a draft model does whose logits are always these."""
    params = SamplingParams(temperature=1.0)
    state = SamplingState(params, lane.state.tokens, seed=lane.state.seed, sequence_index=0, vocab_size=V)
    drafts, probs = [], []
    for ahead in range(lane.num_drafts or 1):
        (token_id,), (drawn_from,) = draw_drafts(q_logits[None], [state], ahead)
        drafts.append(token_id)
        probs.append(drawn_from)
    lane.state.tokens.set_drafts(drafts)
    lane.probs = probs


def judged(p: Tensor, q: Tensor, kind: dict[str, Any], num: int) -> list[Lane]:
    """Lanes of many seeds, all of the same rows of logits, [3, V]; two drafts each, and one more asked for."""

    def ask(lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            before, lane.num_drafts = lane.num_drafts, 1
            drafting(lane, q)
            lane.num_drafts = before

    lanes = [lane_of(SamplingParams(**kind), seed) for seed in range(num)]
    for lane in lanes:
        lane.num_drafts = 2
        drafting(lane, q)
    judge_lanes(p, lanes, Rule(ask=ask))
    return lanes


def fit(lanes: list[Lane], p: Tensor, kind: dict[str, Any]) -> ChiSquare:
    """First tokens, second ones after the likeliest firsts, third ones after the likeliest two."""
    found = ChiSquare()
    params = SamplingParams(**kind)
    for place in range(3):
        groups: dict[tuple[int, ...], list[int]] = {}
        for lane in lanes:
            if len(lane.token_ids) > place:
                groups.setdefault(tuple(lane.token_ids[:place]), []).append(lane.token_ids[place])
        for before in sorted(groups, key=lambda key: -len(groups[key]))[:4]:
            found.add(groups[before], target(p[place].double().numpy(), params, [5, 5, 7, *before]))
    return found


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rejection_keeps_the_distribution(kind: dict[str, Any]) -> None:
    p, q = rows(1, 3), rows(2, 1)[0]
    lanes = judged(p, q, kind, 500)
    found = fit(lanes, p, kind)
    assert found.fits, found
    assert found.freedom >= 10
    assert 50 < sum(len(lane.token_ids) > 1 for lane in lanes) < 450


def mutate_recovered(patch: pytest.MonkeyPatch) -> None:
    """A refused draft is drawn anew from p."""
    true = accept._accept_or_recover

    def wrong(weights: Any, draft_id: int, drawn_from: Any, state: SamplingState) -> int:
        found = true(weights, draft_id, drawn_from, state)
        bits = accept.random_bits(state.seed, 0, state.tokens.position, accept.RECOVER)
        return found if found == draft_id else accept.DrawTable(None, weights).pick(bits)

    patch.setattr(accept, "_accept_or_recover", wrong)


def mutate_bits(patch: pytest.MonkeyPatch) -> None:
    """What is recovered is chosen by the bits that refused the draft."""
    patch.setattr(accept, "RECOVER", accept.ACCEPT)


def mutate_ratio(patch: pytest.MonkeyPatch) -> None:
    """What a draft was drawn from is taken for twice as much."""
    true = accept._accept_or_recover
    patch.setattr(accept, "_accept_or_recover", lambda weights, d, q, state: true(weights, d, q / 2, state))


@pytest.mark.slow
@pytest.mark.parametrize("mutate", [mutate_recovered, mutate_bits, mutate_ratio])
def test_the_test_would_see_a_fault(mutate: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    p, q, kind = rows(1, 3) * 0.6, torch.zeros(V), {"temperature": 1.0}
    assert fit(judged(p, q, kind, 900), p, kind).fits
    mutate(monkeypatch)
    assert not fit(judged(p, q, kind, 900), p, kind).fits


def test_acceptance_is_the_overlap_of_both() -> None:
    """sum(min(p, q)) of the drafts, which no other sampler can exceed."""
    p, q = rows(3, 3), rows(4, 1)[0]
    lanes = judged(p, q, {"temperature": 1.0}, 600)
    overlap = np.minimum(p[0].double().softmax(0).numpy(), q.double().softmax(0).numpy()).sum()
    share = sum(len(lane.token_ids) > 1 for lane in lanes) / len(lanes)
    assert abs(share - overlap) < 4 * math.sqrt(overlap * (1 - overlap) / len(lanes))


@pytest.mark.parametrize("rule", [Rule(), Rule(0.09, 0.3)], ids=["rejection", "typical"])
def test_a_lane_is_judged_as_if_alone(rule: Rule) -> None:
    logits = rows(5, 40)

    def lanes() -> list[Lane]:
        kinds = [SamplingParams(logprobs=2, **kind) for kind in KINDS]
        return [lane_of(kinds[i % 4], i, 4 * i, [3, 5 + i, 7]) for i in range(10)]

    def facts(lane: Lane) -> Any:
        tokens = lane.state.tokens
        return lane.token_ids, lane.logprobs, tokens.output(), tokens.drafts()

    together, alone = lanes(), lanes()
    judge_lanes(logits, together, rule)
    for lane in alone:
        judge_lanes(logits, [lane], rule)
    assert list(map(facts, together)) == list(map(facts, alone))
    for lane in together:
        expected = prompt_logprobs(logits[lane.first_row : lane.first_row + len(lane.token_ids)], lane.token_ids, 2)
        assert lane.logprobs == expected


@pytest.mark.parametrize("computed", [0, 1, 2, 3])
@pytest.mark.parametrize("rule", [Rule(), Rule(0.09, 0.3)], ids=["rejection", "typical"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_how_many_drafts_are_computed_at_once_changes_nothing(kind: dict[str, Any], rule: Rule, computed: int) -> None:
    logits = rows(6, 4)
    for seed in range(20):
        q = rows(20 + seed, 1)[0]
        whole, parts = lane_of(SamplingParams(**kind), seed), lane_of(SamplingParams(**kind), seed)
        for lane in (whole, parts):
            lane.num_drafts = 3
            drafting(lane, q)
        drafts, probs = parts.state.tokens.drafts(), parts.probs
        judge_lanes(logits, [whole], rule)
        found: list[int] = []
        while len(found) < len(whole.token_ids):
            left = parts.state.tokens.num_drafts
            lane = Lane(parts.state, len(found), num_drafts=min(computed, left))
            lane.probs = probs[len(probs) - left :]
            judge_lanes(logits, [lane], rule)
            found += lane.token_ids
        assert found == whole.token_ids, drafts


def test_typical_acceptance_is_medusas() -> None:
    threshold, alpha = 0.09, 0.3
    logits, params = rows(7, 1), SamplingParams(temperature=0.8, top_k=12)
    p = target(logits[0].double().numpy(), params)
    entropy = -sum(x * math.log(x) for x in p if x)
    limit = min(threshold, alpha * math.exp(-entropy))
    taken = 0
    for draft in range(V):
        lane = lane_of(params, 3, 0, [draft], computed=0)
        judge_lanes(logits, [lane], Rule(threshold, alpha))
        if p[draft] > limit:
            assert lane.token_ids == [draft]
            taken += 1
        else:  # what the sampler draws by itself
            plain = lane_of(params, 3)
            assert [lane.token_ids] == sample(logits, [Draw(plain.state, 0)]).token_ids
    assert 1 < taken < 12


def test_a_row_that_can_not_be_judged_fails_by_itself() -> None:
    logits = rows(8, 6)
    logits[4] = math.nan
    logits[1] = -math.inf
    lanes = [lane_of(SamplingParams(), 1, row, drafts) for row, drafts in [(2, [3]), (4, [3]), (1, [])]]
    judge_lanes(logits, lanes, Rule())
    assert lanes[0].token_ids
    assert lanes[0].failure is None
    assert [lane.failure and lane.failure.kind for lane in lanes[1:]] == [FailureKind.INTERNAL, FailureKind.BAD_REQUEST]


def test_drafts_without_a_distribution_are_certain() -> None:
    """Accepted with p(draft), so that the distribution is kept whatever they are."""
    p, kind = rows(9, 1), {"temperature": 1.0}
    lanes = [lane_of(SamplingParams(**kind), seed, 0, [4], computed=0) for seed in range(500)]
    judge_lanes(p, lanes, Rule())
    found = ChiSquare()
    found.add([lane.token_ids[0] for lane in lanes], target(p[0].double().numpy(), SamplingParams(**kind)))
    assert found.fits, found
