"""From logits to tokens: parameters of a sequence, processing, selection, draws, log-probabilities."""

from quire.sampling.lanes import Draw
from quire.sampling.logprobs import prompt_logprobs
from quire.sampling.sampler import SamplerOutput, rank, sample
from quire.sampling.state import SamplingState
from quire.sampling.tokens import SequenceTokens

__all__ = ["Draw", "SamplerOutput", "SamplingState", "SequenceTokens", "prompt_logprobs", "rank", "sample"]
