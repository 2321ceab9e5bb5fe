"""Drafts by Medusa heads: a token each from the hidden state that the newest token was drawn from.

Heads see no drafts, so that all of a step's come from one product a head, for all sequences at once. Tokens are drawn
as the sampler will draw (`quire.speculative.drawing`). The worker gives it a `HeadRunner`; it knows no weights itself.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from quire.config.draft_tree import DraftTree
from quire.config.speculative import SpeculativeConfig
from quire.sampling.state import SamplingState
from quire.speculative.base import DraftedSequence, Proposer
from quire.speculative.drawing import drafting_state

# Heads know less than the model, and what they spread over many tokens is seldom drawn: at half the temperature half as
# many drafts again are accepted, of those of the demo's heads.
_SHARPNESS = 2.0


class HeadRunner(ABC):
    """The heads, on a device, and the sequences' rows."""

    @abstractmethod
    def draw(self, hidden: Tensor, states: Sequence[SamplingState], num_heads: int) -> list[int | None]:
        """Tokens of the first heads for each of [R, H], one sequence's after another's; None where it can't be done."""

    @abstractmethod
    def rank(
        self, hidden: Tensor, states: Sequence[SamplingState], num_heads: int, num_choices: int
    ) -> list[Sequence[int]]:
        """Likewise the likeliest tokens of each, best first; fewer, or none, where there are no more."""


class MedusaProposer(Proposer):
    """Drafts a chain, of each head the token that the sampler would draw, or a tree, of each head the likeliest ones.

    Args:
        config: the method's options. There are as many heads as drafts, or as the tree is deep.
    """

    def __init__(self, config: SpeculativeConfig, runner: HeadRunner) -> None:
        self.max_drafts = config.max_drafts
        self._tree = config.tree
        self._runner = runner
        self._sharpness = math.inf if config.acceptance == "typical" else _SHARPNESS

    def propose(self, rows: Sequence[DraftedSequence], hidden: Tensor) -> Sequence[Sequence[int]]:
        states: list[SamplingState] = []
        num_drafts = 0
        for row in rows:
            if row.memory is None:
                row.memory = drafting_state(row, self._sharpness)
            states.append(row.memory)
            num_drafts = max(num_drafts, row.max_drafts)
        if self._tree is not None:
            return self._fill(self._tree, rows, hidden, states, num_drafts)
        drawn = self._runner.draw(hidden, states, num_drafts)
        drafts: list[list[int]] = []
        for place, row in enumerate(rows):
            chain: list[int] = []
            for token_id in drawn[place * num_drafts : place * num_drafts + row.max_drafts]:
                if token_id is None:
                    break
                chain.append(token_id)
            drafts.append(chain)
        return drafts

    def _fill(
        self,
        tree: DraftTree,
        rows: Sequence[DraftedSequence],
        hidden: Tensor,
        states: Sequence[SamplingState],
        num_nodes: int,
    ) -> list[list[int]]:
        """The first nodes of a tree: what a head says of a place doesn't depend on the node above it."""
        num_heads, num_choices = tree.depths[num_nodes - 1], 1 + max(tree.choices[:num_nodes])
        ranked = self._runner.rank(hidden, states, num_heads, num_choices)
        drafts: list[list[int]] = []
        for place, row in enumerate(rows):
            found = ranked[place * num_heads : (place + 1) * num_heads]
            nodes: list[int] = []
            for depth, choice in zip(tree.depths[: row.max_drafts], tree.choices, strict=False):
                if choice >= len(found[depth - 1]):
                    break
                nodes.append(found[depth - 1][choice])
            drafts.append(nodes)
        return drafts
