"""Drafts by Medusa heads: a token each from the hidden state that the newest token was drawn from.

Heads see no drafts, so that all of a step's come from one product a head, for all sequences at once. Tokens are drawn
as the sampler will draw (`quire.speculative.drawing`). The worker gives it a `HeadRunner`; it knows no weights itself.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from quire.sampling.state import SamplingState
from quire.speculative.base import DraftedSequence, Proposer, Verdict
from quire.speculative.drawing import Drawing, drafting_state

# Heads know less than the model, and what they spread over many tokens is seldom drawn: at half the temperature half as
# many drafts again are accepted, of those of the demo's heads.
_SHARPNESS = 2.0


class HeadRunner(ABC):
    """The heads, on a device, and the sequences' rows."""

    @abstractmethod
    def drawing(self, row: DraftedSequence) -> Drawing:
        """What a sequence is drawn with."""

    @abstractmethod
    def draw(self, hidden: Tensor, states: Sequence[SamplingState], num_heads: int) -> list[int | None]:
        """Tokens of the first heads for each of [R, H], one sequence's after another's; None where it can't be done."""


class MedusaProposer(Proposer):
    """Drafts a chain: of each head the token that the sampler would draw.

    Args:
        max_drafts: of a sequence; there are at least so many heads.
        vocab_size: the model's.
        acceptance: the configuration's; under "typical" it drafts what is likeliest.
    """

    def __init__(self, max_drafts: int, vocab_size: int, runner: HeadRunner, acceptance: str = "exact") -> None:
        self.max_drafts = max_drafts
        self._vocab_size = vocab_size
        self._runner = runner
        self._sharpness = math.inf if acceptance == "typical" else _SHARPNESS

    def propose(
        self, rows: Sequence[DraftedSequence], hidden: Tensor, taps: Sequence[Tensor]
    ) -> Sequence[Sequence[int]]:
        states: list[SamplingState] = []
        num_heads = 0
        for row in rows:
            if row.memory is None:
                drawing = self._runner.drawing(row)
                row.memory = drafting_state(drawing, row.tokens, self._vocab_size, self._sharpness)
            states.append(row.memory)
            num_heads = max(num_heads, row.max_drafts)
        drawn = self._runner.draw(hidden, states, num_heads)
        drafts: list[list[int]] = []
        for place, row in enumerate(rows):
            chain: list[int] = []
            for token_id in drawn[place * num_heads : place * num_heads + row.max_drafts]:
                if token_id is None:
                    break
                chain.append(token_id)
            drafts.append(chain)
        return drafts

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        pass
