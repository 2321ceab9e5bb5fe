"""From logits to tokens: parameters of a sequence, processing, selection, draws, log-probabilities."""

from quire.sampling.logprobs import prompt_logprobs
from quire.sampling.sampler import SamplerOutput, sample
from quire.sampling.state import SamplingState

__all__ = ["SamplerOutput", "SamplingState", "prompt_logprobs", "sample"]
