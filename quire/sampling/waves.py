"""Several positions of a sequence in one step: the next token, and the drafts after it for as long as they are drawn.

Sampled in waves: wave j is position j of all sequences still in agreement with their drafts, and its tokens are
appended before wave j + 1. So parameters that look back (penalties, bad words, processors) and masks only ever see
accepted tokens and need no rollback, and each token has the bits of a run without drafts. Sequences that nothing makes
look back are drawn at all their positions at once, and what follows a refused draft is left. The model runner calls it.
"""

import logging
from collections.abc import Sequence

from torch import Tensor

from quire.ops.native.library import Target, default_target
from quire.sampling import native
from quire.sampling.lanes import Draw, Lane
from quire.sampling.sampler import sample
from quire.sampling.state import SamplingState

logger = logging.getLogger(__name__)


def draw_lanes(logits: Tensor, lanes: Sequence[Lane], target: Target | None = None) -> None:
    """Sample [N, V] logits of any float type into the lanes, and append to their tokens what was drawn.

    `target` is the sampler's.
    """
    wave = 0
    if [lane for lane in lanes if lane.masks]:
        for lane in lanes:
            lane.go_to(0)
    if [lane for lane in lanes if lane.num_drafts] and native.library() is not None:
        lanes = _draw_at_once(logits, lanes, target)
    while lanes:
        output = sample(logits, lanes, target)
        agreeing: list[Lane] = []
        for lane, drawn, logprobs in zip(lanes, output.token_ids, output.logprobs, strict=True):
            tokens = lane.state.tokens
            if not drawn:
                continue
            agrees = lane.num_drafts > wave and lane.follow(drawn[0])
            tokens.append(drawn[0])
            if agrees:
                agreeing.append(lane)
            elif tokens.num_drafts:
                tokens.set_drafts([])
            lane.token_ids = lane.token_ids + drawn if wave else drawn
            if logprobs is not None:
                lane.logprobs = lane.logprobs + logprobs if lane.logprobs else logprobs
        for i, failure in output.failures.items():
            lanes[i].failure = failure
        lanes = agreeing
        wave += 1
        for lane in lanes:
            lane.go_to(wave if lane.tree is None else lane.path[-1])


def _draw_at_once(logits: Tensor, lanes: Sequence[Lane], target: Target | None) -> Sequence[Lane]:
    """Draw for the lanes of which nothing but tokens is wanted, and which look back at nothing; returns the others."""
    others: list[Lane] = []
    chosen: list[Lane] = []
    for lane in lanes:
        is_plain = lane.state.record is not None and lane.num_samples == 1 and lane.tree is None
        (chosen if is_plain else others).append(lane)
    if not chosen:
        return others
    try:
        drawn = native.draw_chains(target or default_target(), logits.cpu(), chosen)
    except Exception:
        logger.exception("drawing %d sequences with their drafts broke", len(chosen))
        return lanes
    for lane, token_ids in zip(chosen, drawn, strict=True):
        if token_ids:
            lane.token_ids = token_ids
            lane.state.tokens.accept(len(token_ids) - 1, token_ids[-1])
        else:  # who draws it by itself will see why
            others.append(lane)
    return others


def sample_ahead(
    logits: Tensor, states: Sequence[SamplingState], ahead: int | Sequence[int], target: Target | None = None
) -> list[int | None]:
    """A token from each of [R, V] logits, drawn as `ahead` positions beyond a sequence's next one; None where it fails.

    `ahead` is one number for all, or each one's. Nothing may look back: no state has penalties, bad words, processors
    or a least number of tokens.
    """
    each = [ahead] * len(states) if isinstance(ahead, int) else ahead
    draws = [Draw(state, row, ahead=each[row]) for row, state in enumerate(states)]
    return [token_ids[0] if token_ids else None for token_ids in sample(logits, draws, target).token_ids]
