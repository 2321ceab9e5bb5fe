"""How a proposer draws: as the sampler will, with the random bits of the position that is drafted.

So a draft is the sampler's own choice wherever proposer and model think alike. Proposers that have logits use it; it
knows neither models nor rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from quire.ops.native.library import Target
from quire.protocol.step import TokenLogprobs
from quire.sampling import Draw, rank
from quire.sampling.accept import Probs
from quire.sampling.state import SamplingState
from quire.sampling_params import SamplingParams
from quire.speculative.base import DraftedSequence

Ints = Sequence[int]

_LEAST = 0.01  # temperature that is not greedy
_KEPT = ("top_k", "top_p", "min_p", "logit_bias", "allowed_token_ids")  # parameters that only choose among tokens


@dataclass(slots=True)
class Order:
    """What is wanted of a sequence: tokens [start, stop) are to be read, then so many drafts drawn.

    Attributes:
        state: how it is drawn for.
        probs: gets what each draft was drawn from, where the runner keeps that.
    """

    row: DraftedSequence
    state: SamplingState
    start: int
    stop: int
    num_drafts: int
    probs: list[Probs] = field(default_factory=list)


class DraftRunner(ABC):
    """A draft model, or a head with layers of its own, its caches, and the sequences' rows.

    `hidden` is what a head reads with the tokens: the model's hidden state before each.
    """

    @abstractmethod
    def num_slots(self, row: DraftedSequence) -> int:
        """Positions of a sequence that have a place in the KV cache."""

    @abstractmethod
    def read(self, rows: Sequence[DraftedSequence], starts: Ints, counts: Ints, hidden: Tensor | None = None) -> None:
        """Read so many tokens of each from a position on, and draw none."""

    @abstractmethod
    def draft(self, orders: Sequence[Order], hidden: Sequence[Tensor] = ()) -> list[list[int]]:
        """Read, then draw as the sampler would at those positions; fewer where it can't be done.

        Most drafts come first. Where drafts are a tree, its first nodes: the best choice is what would be drawn.
        """


def drafting_state(row: DraftedSequence, sharpness: float = 1.0) -> SamplingState:
    """What draws for a sequence as its state does, but for what looks back at tokens or reports: that is left out.

    sharpness: its temperature is divided by this; `math.inf` takes what is likeliest.
    """
    assert (state := row.state) is not None, "nothing says how it is drawn for"
    temperature = state.params.temperature / sharpness
    kept = {name: getattr(state.params, name) for name in _KEPT}
    plain = SamplingParams(temperature=temperature if temperature >= _LEAST else 0.0, **kept)
    seed, index = state.seed, state.sequence_index
    return SamplingState(plain, state.tokens, seed=seed, sequence_index=index, vocab_size=state.vocab_size)


def rank_tokens(
    target: Target | None, logits: Tensor, states: list[SamplingState], nums: list[int]
) -> list[Sequence[int]]:
    """Of each row so many of the likeliest tokens, best first; fewer, or none, where there are no more."""
    ranked = rank(logits, [Draw(*of) for of in zip(states, range(len(states)), nums, strict=True)], target)
    return [found.token_ids if isinstance(found, TokenLogprobs) else () for found in ranked]
