"""Drafts judged by a rule: what the model runner does instead of drawing where acceptance is not "exact".

Where a draft follows from the tokens before it alone, one is asked for wherever none was computed: then a token is a
function of its request and place, however many drafts there were. Where it does not ("typical" with other proposers),
a row keeps its drafts until they are judged, and a preempted sequence gets them back: then tokens are a function of
the request alone, too. It knows rows, and no plan.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.ops.native.library import Target
from quire.sampling.accept import Rule, judge_lanes
from quire.sampling.lanes import Lane
from quire.sampling.waves import draw_lanes
from quire.speculative.base import Proposer
from quire.worker.rows import Row

NO_HIDDEN = torch.empty(0, 0)


class Judge:
    """Draws for the lanes of a step under a rule.

    Attributes:
        restores: whether drafts of a preempted sequence are of use.
    """

    def __init__(self, target: Target | None, proposer: Proposer, rule: Rule) -> None:
        self.restores = not proposer.from_prefix
        self._target, self._proposer = target, proposer
        self._rule = replace(rule, ask=self._ask if proposer.from_prefix else None)

    def draw(self, logits: Tensor, lanes: Sequence[Lane], rows: Sequence[Row]) -> None:
        """Sample [N, V] logits into lanes, one a row; greedy ones, and those without drafts, as they always are."""
        plain: list[Lane] = []
        judged: list[Lane] = []
        for lane, row in zip(lanes, rows, strict=True):
            if (drafted := row.drafted) is None or lane.state.greedy or lane.num_samples > 1:
                plain.append(lane)
                continue
            lane.drafted = drafted
            if drafted.probs is not None and drafted.tokens.num_drafts:
                lane.probs = list(drafted.probs.numpy()[drafted.tokens.num - drafted.num_before :])
            judged.append(lane)
        if plain:
            draw_lanes(logits, plain, self._target)
        if judged:
            judge_lanes(logits, judged, self._rule, self._target)

    def _ask(self, lanes: Sequence[Lane]) -> None:
        """One draft for the next position of each lane."""
        rows = [lane.drafted for lane in lanes]
        for row in rows:
            row.max_drafts = 1
        for lane, row, drafts in zip(lanes, rows, self._proposer.propose(rows, NO_HIDDEN), strict=True):
            if drafts:
                row.tokens.set_drafts(drafts[:1])
                lane.probs = [row.probs[0].numpy()] if row.probs is not None else []
