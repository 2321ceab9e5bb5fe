"""Drafts judged by a rule, where it is not that the sampler draws them: "rejection" and "typical".

Rejection is the modified rejection sampler of Leviathan et al. (2023) and Chen et al. (2023); typical acceptance is
Medusa's (Cai et al., 2024). Both see the distribution after all processing. Every random number is of (seed, sequence,
position, purpose), and a lane's judgement of nothing but its own row, so that whoever else is in the step changes no
bit. `quire.worker.judging` calls it, for lanes whose `drafted` is set; it knows no proposer.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.ops.native.library import Target
from quire.sampling.lanes import Draw, Lane
from quire.sampling.logprobs import prompt_logprobs
from quire.sampling.processing import RowError
from quire.sampling.random import ACCEPT, DRAFT, RECOVER, random_bits
from quire.sampling.sampler import row_weights, sample
from quire.sampling.select import DrawTable, Weights
from quire.sampling.state import SamplingState

Probs = npt.NDArray[np.float64]


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
    logits = logits.cpu()
    refused: list[Lane] = []
    without = [lane for lane in lanes if _judge(logits, lane, rule, refused)]
    # The first token of all is just drawn: a draft model need not have read the prompt by then.
    if rule.ask is not None and (due := [lane for lane in without if lane.state.tokens.position]):
        rule.ask(due)
        without = [lane for lane in without if _judge(logits, lane, rule, refused)]
    _draw(logits, refused + without, target)
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
    logits = logits.cpu()
    token_ids: list[int | None] = [None] * len(states)
    probs: list[Probs | None] = [None] * len(states)
    for i, state in enumerate(states):
        if not state.greedy:
            with suppress(RowError):
                weights = row_weights(logits, Draw(state, i))
                bits = random_bits(state.seed, state.sequence_index, state.tokens.position + ahead, DRAFT)
                token_ids[i], probs[i] = DrawTable(None, weights).pick(bits), _probs(weights)
    if greedy := [i for i, state in enumerate(states) if state.greedy]:
        output = sample(logits, [Draw(states[i], i) for i in greedy], target)
        for i, drawn in zip(greedy, output.token_ids, strict=True):
            token_ids[i] = drawn[0] if drawn else None
    return token_ids, probs


def _judge(logits: Tensor, lane: Lane, rule: Rule, refused: list[Lane]) -> bool:
    """Judge the drafts of a lane for as long as they are accepted; joins `refused` if it has none in a draft's place.

    Returns whether it has a position left of which there is no draft.
    """
    tokens = lane.state.tokens
    while (place := len(lane.token_ids)) <= lane.num_drafts:
        if not tokens.has_draft:
            return True
        try:
            lane.go_to(place)
            weights = row_weights(logits, lane)
        except RowError as error:
            lane.failure = error.failure
            return False
        draft_id = int(tokens.ids[tokens.num])
        drawn_from = lane.probs.pop(0) if lane.probs else None
        if rule.threshold is None:
            chosen = _accept_or_recover(weights, draft_id, drawn_from, lane.state)
        elif _is_typical(weights, draft_id, rule):
            chosen = draft_id
        else:
            refused.append(lane)
            return False
        lane.token_ids.append(chosen)
        tokens.append(chosen)
        if chosen != draft_id:
            tokens.set_drafts([])
            return False
    return False


def _accept_or_recover(weights: Weights, draft_id: int, drawn_from: Probs | None, state: SamplingState) -> int:
    """The draft with min(1, p/q), else a token of the normalized positive part of p - q."""
    key = state.seed, state.sequence_index, state.tokens.position
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
    for lane in lanes:
        lane.go_to(len(lane.token_ids))
    output = sample(logits, lanes, target)
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
