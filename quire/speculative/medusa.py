"""Drafts by Medusa heads: a token each from the hidden state that the newest token was drawn from.

Heads see no drafts, so that all of a step's come from one product a head, for all sequences at once. Tokens are drawn
as the sampler will draw (`quire.speculative.drawing`). The worker gives it the heads' logits; it knows no weights.
"""

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from quire.config.draft_tree import DraftTree
from quire.config.speculative import SpeculativeConfig
from quire.ops.native.library import Target
from quire.sampling.state import SamplingState
from quire.sampling.waves import sample_ahead
from quire.speculative.base import DraftedSequence, Proposer
from quire.speculative.drawing import drafting_state, rank_tokens

# Heads know less than the model, and what they spread over many tokens is seldom drawn: at half the temperature half as
# many drafts again are accepted, of those of the demo's heads.
_SHARPNESS = 2.0


class MedusaProposer(Proposer):
    """Drafts a chain, of each head the token that the sampler would draw, or a tree, of each head the likeliest ones.

    Args:
        config: the method's options. There are as many heads as drafts, or as the tree is deep.
        logits: what the first heads make of hidden states: [R, H] -> [R * num_heads, V], one row's after another's.
        target: where tokens are drawn from them.
    """

    def __init__(
        self, config: SpeculativeConfig, logits: Callable[[Tensor, int], Tensor], target: Target | None
    ) -> None:
        self.max_drafts = config.max_drafts
        self._tree = config.tree
        self._logits, self._target = logits, target
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
        logits, each = self._logits(hidden, num_drafts), [state for state in states for _ in range(num_drafts)]
        drawn = sample_ahead(logits, each, [*range(num_drafts)] * len(states), self._target)
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
        logits, each = self._logits(hidden, num_heads), [state for state in states for _ in range(num_heads)]
        ranked = rank_tokens(self._target, logits, each, [num_choices] * len(each))
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
