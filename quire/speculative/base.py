"""The contract of a proposer, which drafts tokens ahead of the model.

The model runner calls it after each step's tokens are drawn; the rows keep what it proposes. Where acceptance is
"exact" a draft is accepted when the sampler draws it, so that a proposer changes how fast tokens come and never which;
by other rules `quire.worker.judging` accepts. It knows no plan.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from quire.sampling.state import SamplingState
from quire.sampling.tokens import SequenceTokens


@dataclass(slots=True)
class DraftedSequence:
    """One sequence as a proposer sees it: the same object as long as its row lives.

    Attributes:
        sequence_id: unique in the engine's life.
        tokens: read only; keys and values of all but the last are in the cache.
        state: how the sampler draws for it; not needed by what drafts without logits.
        shares: its tokens may help others: its request has no cache salt.
        greedy: its tokens are the likeliest ones, and not drawn.
        max_drafts: most drafts of it for the next step, >= 1.
        plain_state: how what drafts draws for it, once that is worked out (`quire.worker.drafting.drafting_state`).
        memory: what the proposer keeps of it, which goes with the row; None at first.
        acceptance: likewise of `quire.speculative.pace.Pace`.
        num_before: tokens that it had when the newest drafts were proposed.
        probs: [num_drafts, V] float64, the distribution that each of the newest drafts was drawn from, for the
            acceptance "rejection"; None where they are certain. A proposer that draws sets it in `propose`.
    """

    sequence_id: int
    tokens: SequenceTokens
    state: SamplingState | None = None
    shares: bool = True
    greedy: bool = True
    max_drafts: int = 0
    plain_state: SamplingState | None = None
    memory: Any = None
    acceptance: Any = None
    num_before: int = 0
    probs: Tensor | None = None


class ComputedSpan(NamedTuple):
    """What a step computed of one sequence.

    Attributes:
        row: the sequence, whose newest tokens are not drawn yet.
        start: position of its first token in the step.
        first: row of the step's hidden states that belongs to it; `num_tokens` in all.
        num_drafts: of them, the last ones, drafts that may be refused.
    """

    row: DraftedSequence
    start: int
    first: int
    num_tokens: int
    num_drafts: int


class Proposer(ABC):
    """Draws drafts for the next step.

    Attributes:
        max_drafts: most that it proposes for a sequence.
        max_batch: in steps of so many sequences it is not asked.
        uses_hidden: whether it looks at hidden states; where not, none are handed to it.
        reads_all: whether it is handed all that a step computed (`read`).
        taps: indices of the model's layers whose outputs it reads, ascending.
        from_prefix: whether a draft, and what it was drawn from, follows from the tokens before it alone, so that it
            may be asked for at any position. Only such a proposer may set `probs`.
    """

    max_drafts: int
    max_batch: float = math.inf
    uses_hidden: bool = False
    reads_all: bool = False
    taps: Sequence[int] = ()
    from_prefix: bool = False

    @abstractmethod
    def propose(self, rows: Sequence[DraftedSequence], hidden: Tensor) -> Sequence[Sequence[int]]:
        """Drafts for each of R sequences, at most its `max_drafts`, ids in the vocabulary; [] for none.

        Args:
            rows: those that drew a token in this step.
            hidden: [R, H], the model's last hidden state from which each drew its newest token.
        """

    def read(self, spans: Sequence[ComputedSpan], hidden: Tensor, taps: Sequence[Tensor]) -> None:
        """Take note of what a step of T tokens computed, before tokens are drawn from it.

        Args:
            hidden: [T, H], the model's last hidden states.
            taps: of each of `self.taps`, likewise.
        """
        raise NotImplementedError

    def num_behind(self, row: DraftedSequence) -> int:
        """Tokens of a sequence that drafting would read first; 0 where that costs nothing."""
        return 0

    def forget(self, row: DraftedSequence) -> None:  # noqa: B027 - most have nothing to do
        """A sequence ended or was preempted; its tokens are still there."""
