"""Several positions of a sequence in one step: the next token, and the drafts after it for as long as they are drawn.

Sampled in waves: wave j is position j of all sequences still in agreement with their drafts, and its tokens are
appended before wave j + 1. So parameters that look back (penalties, bad words, processors) and masks only ever see
accepted tokens and need no rollback, and each token has the bits of a run without drafts. Sequences that nothing makes
look back are drawn at all their positions at once, and what follows a refused draft is left. The model runner calls it.
"""

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from quire.config.draft_tree import DraftTree
from quire.ops.native.library import Target, default_target
from quire.protocol.step import Failure, TokenLogprobs
from quire.sampling import native
from quire.sampling.processing import Mask
from quire.sampling.sampler import Draws, sample
from quire.sampling.state import SamplingState

logger = logging.getLogger(__name__)


class Lane:
    """One sequence of a step: what it draws, and then what it drew.

    Attributes:
        first_row: row of the logits of its first position; those of its drafts follow.
        num_drafts: how many of the drafts in its row were computed.
        num_samples: draws at its one position, > 1 only without drafts; the first of them is appended.
        masks: a grammar's bitmask by sampled position, where there is one.
        tree: the shape of the drafts, where they are no chain: `masks` are then by place among the computed, as is
        path: the place of what each token was drawn from, 0 and then 1 + its node.
        draft_ids: those of the tree.
        drafted: the proposer's view of the sequence where a rule judges its drafts (`quire.sampling.accept`), not
            whether the sampler draws them.
        probs: then float64 [V], what each draft in its row was drawn from; [] where they are certain.
        token_ids: what was appended, or the samples.
        logprobs: one for each of them, where asked for.
        failure: why there is no token.
    """

    __slots__ = (
        "draft_ids", "drafted", "failure", "first_row", "logprobs", "masks", "num_drafts", "num_samples", "path",
        "probs", "state", "token_ids", "tree",
    )  # fmt: skip

    def __init__(self, state: SamplingState, first_row: int, num_drafts: int = 0, num_samples: int = 1) -> None:
        self.state = state
        self.first_row = first_row
        self.num_drafts = num_drafts
        self.num_samples = num_samples
        self.masks: dict[int, Mask] | None = None
        self.tree: DraftTree | None = None
        self.drafted: Any = None
        self.probs: list[Any] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None
        self.failure: Failure | None = None

    @property
    def num_refused(self) -> int:
        """Drafts that were computed in vain."""
        return self.num_drafts + 1 - len(self.token_ids) if self.num_drafts else 0

    @property
    def max_accepted(self) -> int:
        """Most of its drafts that can be accepted."""
        return self.num_drafts if self.tree is None else self.tree.depths[self.num_drafts - 1]

    def mask(self, place: int) -> Mask | None:
        """The bitmask of a sampled position, or place, where there is one."""
        return self.masks.get(place) if self.masks else None

    def use_tree(self, tree: DraftTree) -> None:
        """Its drafts are the first nodes of a tree."""
        tokens = self.state.tokens
        self.tree, self.path = tree, [0]
        self.draft_ids: list[int] = tokens.ids[tokens.num : tokens.num + self.num_drafts].tolist()

    def drawn_rows(self) -> list[int]:
        """The row of the logits that each token was drawn from."""
        if self.tree is not None:
            return [self.first_row + place for place in self.path]
        return list(range(self.first_row, self.first_row + len(self.token_ids)))

    def follow(self, token_id: int) -> bool:
        """Go on to the node of a token that was drawn, if there is one, in the tree."""
        assert self.tree is not None
        for node in self.tree.children[self.path[-1]]:
            if node < self.num_drafts and self.draft_ids[node] == token_id:
                self.path.append(1 + node)
                return True
        return False


def draw_lanes(logits: Tensor, lanes: Sequence[Lane], target: Target | None = None) -> None:
    """Sample [N, V] logits of any float type into the lanes, and append to their tokens what was drawn.

    `target` is the sampler's.
    """
    wave = 0
    if [lane for lane in lanes if lane.num_drafts] and native.library() is not None:
        lanes = _draw_at_once(logits, lanes, target)
    while lanes:
        places = [wave if lane.tree is None else lane.path[-1] for lane in lanes]
        rows = [lane.first_row + place for lane, place in zip(lanes, places, strict=True)]
        masks = None
        if [lane for lane in lanes if lane.masks]:
            masks = [lane.mask(place) for lane, place in zip(lanes, places, strict=True)]
        num_samples = [lane.num_samples for lane in lanes]
        output = sample(logits, Draws([lane.state for lane in lanes], num_samples, rows, masks), target)
        agreeing: list[Lane] = []
        for lane, drawn, logprobs in zip(lanes, output.token_ids, output.logprobs, strict=True):
            tokens = lane.state.tokens
            if not drawn:
                continue
            if (
                lane.follow(drawn[0])
                if lane.tree is not None
                else lane.num_drafts > wave and tokens.ids[tokens.num] == drawn[0]
            ):
                agreeing.append(lane)
                tokens.append(drawn[0])
            else:
                tokens.append(drawn[0])
                if tokens.num_drafts:
                    tokens.set_drafts([])
            lane.token_ids = lane.token_ids + drawn if wave else drawn
            if logprobs is not None:
                lane.logprobs = lane.logprobs + logprobs if lane.logprobs else logprobs
        for i, failure in output.failures.items():
            lanes[i].failure = failure
        lanes = agreeing
        wave += 1


def _draw_at_once(logits: Tensor, lanes: Sequence[Lane], target: Target | None) -> Sequence[Lane]:
    """Draw for the lanes of which nothing but tokens is wanted, and which look back at nothing; returns the others."""
    others: list[Lane] = []
    chosen: list[Lane] = []
    chains: list[native.Chain] = []
    for lane in lanes:
        state, tokens, count = lane.state, lane.state.tokens, lane.num_drafts
        if state.record is None or lane.num_samples > 1 or lane.tree is not None or state.num_logprobs is not None:
            others.append(lane)
            continue
        chosen.append(lane)
        drafts = tokens.ids[tokens.num : tokens.num + count].tolist() if count else []
        masks = [lane.masks.get(position) for position in range(count + 1)] if lane.masks else None
        chains.append(native.Chain(state, lane.first_row, 0, drafts, masks))
    if not chosen:
        return others
    for lane, token_ids in zip(chosen, _draw_chains(logits, chains, target), strict=True):
        if token_ids:
            lane.token_ids = token_ids
            lane.state.tokens.accept(len(token_ids) - 1, token_ids[-1])
        else:
            others.append(lane)
    return others


def _draw_chains(logits: Tensor, chains: Sequence[native.Chain], target: Target | None) -> Sequence[list[int]]:
    """Of each what was drawn; [] where that fails, and who draws it by itself will see why."""
    try:
        return native.draw_chains(target or default_target(), logits.cpu(), chains)
    except Exception:
        logger.exception("drawing %d sequences with their drafts broke", len(chains))
        return [[] for _ in chains]


def sample_ahead(
    logits: Tensor, states: Sequence[SamplingState], ahead: int | Sequence[int], target: Target | None = None
) -> list[int | None]:
    """A token from each of [R, V] logits, drawn as `ahead` positions beyond a sequence's next one; None where it fails.

    `ahead` is one number for all, or each one's. Nothing may look back: no state has penalties, bad words, processors
    or a least number of tokens.
    """
    each = [ahead] * len(states) if isinstance(ahead, int) else ahead
    if native.library() is None:
        return [_draw_ahead(logits, *one) for one in zip(range(len(states)), states, each, strict=True)]
    chains = [native.Chain(*row, []) for row in zip(states, range(len(states)), each, strict=True)]
    return [token_ids[0] if token_ids else None for token_ids in _draw_chains(logits, chains, target)]


def _draw_ahead(logits: Tensor, row: int, state: SamplingState, ahead: int) -> int | None:
    """What the compiled sampler would draw; nothing but the position tells it from the next token."""
    state.tokens.num += ahead
    try:
        token_ids = sample(logits, Draws([state], [1], [row])).token_ids[0]
    finally:
        state.tokens.num -= ahead
    return token_ids[0] if token_ids else None
