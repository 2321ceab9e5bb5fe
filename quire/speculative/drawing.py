"""How a proposer draws: as the sampler will, with the random bits of the position that is drafted.

So a draft is the sampler's own choice wherever proposer and model think alike. Proposers that have logits use it; it
knows neither models nor rows.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.sampling.accept import Probs
from quire.sampling.state import SamplingState
from quire.sampling.tokens import SequenceTokens
from quire.sampling_params import SamplingParams

_LEAST = 0.01  # temperature that is not greedy


@dataclass(frozen=True)
class Drawing:
    """What a sequence is drawn with: its request's parameters and seed, and which of the request's it is."""

    params: SamplingParams
    seed: int
    sequence_index: int


@dataclass(slots=True)
class Order:
    """What is wanted of a sequence: tokens [start, stop) are to be read, then so many drafts drawn.

    Attributes:
        own: the runner's own of the sequence.
        state: how it is drawn for.
        probs: gets what each draft was drawn from, where the runner keeps that.
    """

    own: Any
    state: SamplingState
    start: int
    stop: int
    num_drafts: int
    probs: list[Probs] = field(default_factory=list)


def drafting_state(drawing: Drawing, tokens: SequenceTokens, vocab_size: int, sharpness: float = 1.0) -> SamplingState:
    """How the sampler draws for a sequence, but for what looks back at tokens or reports: that is left out.

    sharpness: its temperature is divided by this; `math.inf` takes what is likeliest.
    """
    params = drawing.params
    temperature = params.temperature / sharpness
    plain = msgspec.structs.replace(
        params,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logits_processors=None,
        min_tokens=0,
        logprobs=None,
        prompt_logprobs=None,
        n=1,
        temperature=temperature if temperature >= _LEAST else 0.0,
    )
    return SamplingState(plain, tokens, seed=drawing.seed, sequence_index=drawing.sequence_index, vocab_size=vocab_size)
