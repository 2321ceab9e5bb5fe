"""From logits to tokens: parameters of a sequence, processing, selection, draws, log-probabilities."""

from quire.sampling.logprobs import prompt_logprobs
from quire.sampling.sampler import Draws, SamplerOutput, rank, sample
from quire.sampling.state import SamplingState
from quire.sampling.tokens import SequenceTokens

__all__ = ["Draws", "SamplerOutput", "SamplingState", "SequenceTokens", "prompt_logprobs", "rank", "sample"]
