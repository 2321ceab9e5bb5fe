"""Drafts that are right at a rate that is chosen: the tokens of an earlier run, each spoiled with some probability.

`quire bench spec` puts it in the place of a model's own proposer, and so measures what verifying costs and what any
proposer of that acceptance would gain. Draws nothing from a clock or a shared generator: runs are alike.
"""

import random
from collections.abc import Mapping, Sequence

from torch import Tensor

from quire.speculative.base import DraftedSequence, Proposer


class ReplayProposer(Proposer):
    """Proposes what each sequence is known to go on with.

    Args:
        max_drafts: of a sequence.
        rate: probability that a draft is the known token, whatever came before it; else it is the next token id.
        vocab_size: ids wrap there.
        outputs: the tokens that follow each prompt.
    """

    def __init__(
        self, max_drafts: int, rate: float, vocab_size: int, outputs: Mapping[tuple[int, ...], Sequence[int]]
    ) -> None:
        self.max_drafts = max_drafts
        self._rate, self._vocab_size, self._outputs = rate, vocab_size, outputs

    def propose(self, rows: Sequence[DraftedSequence], hidden: Tensor) -> Sequence[Sequence[int]]:
        drafts = []
        for row in rows:
            if row.memory is None:
                row.memory = self._spoiled(tuple(row.tokens.prompt()))
            position = row.tokens.position
            drafts.append(row.memory[position : position + row.max_drafts])
        return drafts

    def _spoiled(self, prompt: tuple[int, ...]) -> list[int]:
        """A sequence's drafts, one for each position."""
        draw, known = random.Random(hash(prompt)), self._outputs[prompt]
        return [token if draw.random() < self._rate else (token + 1) % self._vocab_size for token in known]
