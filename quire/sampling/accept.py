"""Drafts judged by a rule, where it is not that the sampler draws them: "rejection" and "typical".

Rejection is the modified rejection sampler of Leviathan et al. (2023) and Chen et al. (2023); typical acceptance is
Medusa's (Cai et al., 2024). Both see the distribution after all processing. Every random number is of (seed, sequence,
position, purpose), and a lane's judgement of nothing but its own row, so that whoever else is in the step changes no
bit. The device calls it, for lanes whose `drafted` is set; it knows no proposer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.ops.native.library import Target
from quire.sampling.logprobs import prompt_logprobs
from quire.sampling.random import ACCEPT, DRAFT, RECOVER, random_bits
from quire.sampling.sampler import Draws, sample, weigh_rows
from quire.sampling.select import DrawTable, Weights
from quire.sampling.state import SamplingState
from quire.sampling.tokens import NO_DRAFT
from quire.sampling.waves import Lane

Probs = npt.NDArray[np.float64]

_WEIGHED_NUMEL = 2**22  # weights held at once: 32 MB


@dataclass(frozen=True, slots=True)
class Rule:
    """When a draft is accepted.

    Attributes:
        threshold, alpha: Medusa's `posterior_threshold` and `posterior_alpha`; threshold None: the rejection sampler.
        ask: drafts one token, with its `probs`, for lanes whose drafts are used up; None where none are asked for.
    """

    threshold: float | None = None
    alpha: float = 0.0
    ask: Callable[[Sequence[Lane]], None] | None = None


def judge_lanes(logits: Tensor, lanes: Sequence[Lane], rule: Rule, target: Target | None = None) -> None:
    """As `quire.sampling.waves.draw_lanes`, by a rule.

    The last position of a lane is judged, too, if its row has a draft that was not computed, or gets one from `ask`;
    drafts that are left after it stay in the row.
    """
    without = [lane for lane in lanes if not lane.state.tokens.has_draft]
    active = [lane for lane in lanes if lane.state.tokens.has_draft]
    while active:
        agreeing = _judge(logits, active, rule, target)
        active = [lane for lane in agreeing if lane.state.tokens.has_draft]
        without += [lane for lane in agreeing if not lane.state.tokens.has_draft]
    # The first token of all is just drawn: a draft model need not have read the prompt by then.
    if rule.ask is not None and (due := [lane for lane in without if lane.state.position]):
        rule.ask(due)
        _judge(logits, [lane for lane in due if lane.state.tokens.num_drafts], rule, target)
    _draw(logits, [lane for lane in without if not lane.failure and len(lane.token_ids) == lane.num_drafts], target)
    for lane in lanes:
        k, num = lane.state.num_logprobs, len(lane.token_ids)
        if k is not None and num and lane.failure is None:
            lane.logprobs = prompt_logprobs(logits[lane.first_row : lane.first_row + num], lane.token_ids, k, target)


def draw_drafts(
    logits: Tensor, states: Sequence[SamplingState], ahead: int, target: Target | None = None
) -> tuple[list[int | None], list[Probs | None]]:
    """A draft from each of [R, V] logits, `ahead` positions beyond a sequence's next one, and what it was drawn from.

    None, and None, where that fails; greedy ones are drawn from nothing. Nothing may look back, as for
    `quire.sampling.waves.sample_ahead`.
    """
    token_ids: list[int | None] = [None] * len(states)
    probs: list[Probs | None] = [None] * len(states)
    drawing = [i for i, state in enumerate(states) if not state.greedy]
    weights, failures = weigh_rows(logits, Draws([states[i] for i in drawing], [1] * len(drawing), drawing), target)
    for row, i in enumerate(drawing):
        if row not in failures:
            state = states[i]
            bits = random_bits(state.seed, state.sequence_index, state.position + ahead, DRAFT)
            token_ids[i], probs[i] = DrawTable(None, weights[row]).pick(bits), _probs(weights[row])
    if greedy := [i for i, state in enumerate(states) if state.greedy]:
        output = sample(logits, Draws([states[i] for i in greedy], [1] * len(greedy), greedy), target)
        for i, drawn in zip(greedy, output.token_ids, strict=True):
            token_ids[i] = drawn[0] if drawn else None
    return token_ids, probs


@dataclass(slots=True)
class _Span:
    """Positions of a lane that are judged together: its next one, and more where nothing looks back at tokens."""

    lane: Lane
    draft_ids: list[int]

    @classmethod
    def next_of(cls, lane: Lane) -> "_Span":
        tokens, state = lane.state.tokens, lane.state
        num = 1 if state.looks_back else min(tokens.num_drafts, lane.num_drafts + 1 - len(lane.token_ids))
        draft_ids = tokens.ids[tokens.num : tokens.num + num].tolist()
        return cls(lane, draft_ids[:-1] if draft_ids[-1] == NO_DRAFT else draft_ids)


def _judge(logits: Tensor, lanes: Sequence[Lane], rule: Rule, target: Target | None) -> list[Lane]:
    """Judge the next drafts of lanes; returns those that have agreed so far and have a position left."""
    spans = [_Span.next_of(lane) for lane in lanes]
    agreeing: list[Lane] = []
    size = max(1, _WEIGHED_NUMEL // logits.shape[1])
    while spans:
        num = num_rows = 0
        while num < len(spans) and (not num or num_rows + len(spans[num].draft_ids) <= size):
            num_rows += len(spans[num].draft_ids)
            num += 1
        agreeing += _judge_spans(logits, spans[:num], rule, target)
        spans = spans[num:]
    return agreeing


def _judge_spans(logits: Tensor, spans: Sequence[_Span], rule: Rule, target: Target | None) -> list[Lane]:
    places = [(span.lane, len(span.lane.token_ids) + j) for span in spans for j in range(len(span.draft_ids))]
    masks = [lane.masks.get(place) if lane.masks else None for lane, place in places]
    states, rows = [lane.state for lane, _ in places], [lane.first_row + place for lane, place in places]
    weights, failures = weigh_rows(logits, Draws(states, [1] * len(rows), rows, masks), target)
    agreeing: list[Lane] = []
    refused: list[Lane] = []
    start = 0
    for span in spans:
        lane, tokens = span.lane, span.lane.state.tokens
        for row, draft_id in enumerate(span.draft_ids, start):
            if row in failures:
                lane.failure = failures[row]
                break
            drawn_from = lane.probs.pop(0) if lane.probs else None
            if rule.threshold is not None:
                chosen = draft_id if _is_typical(weights[row], draft_id, rule) else None
            else:
                chosen = _accept_or_recover(weights[row], draft_id, drawn_from, lane.state)
            if chosen is None:
                refused.append(lane)
                break
            lane.token_ids.append(chosen)
            tokens.append(chosen)
            if chosen != draft_id:
                tokens.set_drafts([])
                break
        else:
            if len(lane.token_ids) <= lane.num_drafts:
                agreeing.append(lane)
        start += len(span.draft_ids)
    _draw(logits, refused, target)
    return agreeing


def _accept_or_recover(weights: Weights, draft_id: int, drawn_from: Probs | None, state: SamplingState) -> int:
    """The draft with min(1, p/q), else a token of the normalized positive part of p - q."""
    key = state.seed, state.sequence_index, state.position
    if drawn_from is None:  # a certain draft
        drawn_from = np.zeros(len(weights))
        drawn_from[draft_id] = 1.0
    total = int(weights.sum())
    if _unit(random_bits(*key, ACCEPT)) * drawn_from[draft_id] * total < weights[draft_id]:
        return draft_id
    rest = np.maximum(_probs(weights) - drawn_from, 0.0)
    sums = np.cumsum(rest)
    if not sums[-1] > 0.0:  # q was no distribution, or the same one but for its last bits
        return DrawTable(None, weights).pick(random_bits(*key, RECOVER))
    sought = min(_unit(random_bits(*key, RECOVER)) * sums[-1], np.nextafter(sums[-1], 0.0))
    return int(np.searchsorted(sums, sought, side="right"))


def _is_typical(weights: Weights, draft_id: int, rule: Rule) -> bool:
    """Whether p(draft) is above min(threshold, alpha * exp(-entropy of p))."""
    assert rule.threshold is not None
    total = float(weights.sum())
    if (probability := weights[draft_id] / total) > rule.threshold:
        return True
    kept = weights[weights > 0].astype(np.float64)  # row by row, so that no neighbour decides where a vector ends
    entropy = math.log(total) - float((kept * np.log(kept)).sum()) / total
    return probability > rule.alpha * math.exp(-entropy)


def _draw(logits: Tensor, lanes: Sequence[Lane], target: Target | None) -> None:
    """Draw the next token of each lane as the sampler does; drafts beyond it are void."""
    if not lanes:
        return
    places = [len(lane.token_ids) for lane in lanes]
    masks = [lane.masks.get(place) if lane.masks else None for lane, place in zip(lanes, places, strict=True)]
    rows = [lane.first_row + place for lane, place in zip(lanes, places, strict=True)]
    output = sample(logits, Draws([lane.state for lane in lanes], [1] * len(lanes), rows, masks), target)
    for lane, drawn in zip(lanes, output.token_ids, strict=True):
        if drawn:
            lane.token_ids += drawn
            lane.state.tokens.append(drawn[0])
            lane.state.tokens.set_drafts([])
    for i, failure in output.failures.items():
        lanes[i].failure = failure


def _probs(weights: Weights) -> Probs:
    return weights / float(weights.sum())


def _unit(bits: int) -> float:
    """In [0, 1)."""
    return (bits >> 11) * 2.0**-53
