"""The contract of a proposer, which drafts tokens ahead of the model.

The model runner calls it after each step's tokens are drawn; the rows keep what it proposes. A draft is accepted when
the sampler draws it, so that a proposer changes how fast tokens come and never which. It knows no plan.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from quire.sampling.tokens import SequenceTokens


@dataclass(frozen=True, slots=True)
class DraftedSequence:
    """One sequence as a proposer sees it."""

    sequence_id: int  # unique in the engine's life
    tokens: SequenceTokens  # read only; keys and values of all but the last are in the cache


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a sequence's drafts."""

    sequence_id: int
    num_drafts: int
    num_accepted: int


class Proposer(ABC):
    """Draws drafts for the next step.

    Attributes:
        max_drafts: most that it proposes for a sequence.
    """

    max_drafts: int

    @abstractmethod
    def propose(
        self, rows: Sequence[DraftedSequence], hidden: Tensor, taps: Sequence[Tensor]
    ) -> Sequence[Sequence[int]]:
        """Drafts for each of R sequences, at most `max_drafts`, ids in the vocabulary; [] for none.

        Args:
            rows: those that drew a token in this step.
            hidden: [R, H], the model's last hidden state from which each drew its newest token.
            taps: the same of the layers that the proposer asked for, [R, H] each.
        """

    @abstractmethod
    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """Take note of what became of earlier drafts."""
