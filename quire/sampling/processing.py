"""Rows of logits as float32, and what changes them before a token is chosen, in vLLM's order:

a grammar's mask, allowed_token_ids, bad_words, min_tokens, logit_bias, the user's logits_processors, then penalties
(repetition over prompt and output, frequency and presence over the output). Called by the sampler with a row of its
own; touches only the entries concerned. Knows nothing of temperature or drawing.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from quire.protocol.step import Failure, FailureKind
from quire.sampling.state import Floats, Ids, Mask, SamplingState
from quire.sampling_params import SamplingParams

_NEVER = float("-inf")


class RowError(Exception):
    """One row can't be sampled; the message is for the user. Other rows go on."""

    def __init__(self, message: str, kind: FailureKind = FailureKind.BAD_REQUEST) -> None:
        super().__init__(message)
        self.failure = Failure(kind, message)


def float32_array(logits: torch.Tensor) -> Floats:
    """The tensor as a float32 numpy array, of its shape; shares memory where it is float32 already. On the CPU."""
    logits = logits.detach()
    if logits.dtype is not torch.bfloat16:
        return logits.float().numpy()
    # A bfloat16 is the upper half of a float32. In numpy, as torch would wake its threads for each row.
    bits = logits.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    bits <<= np.uint32(16)
    return bits.view(np.float32)


def process_logits(logits: Floats, state: SamplingState, mask: Mask | None = None) -> None:
    """Apply `mask` and all that `state` asks for to `logits`, float32 [vocabulary], in place.

    Raises:
        RowError: a logits processor of the user raised or returned something else than logits.
    """
    if mask is not None:
        allowed = np.unpackbits(mask.words.view(np.uint8), count=len(logits), bitorder="little")
        logits[allowed == 0] = _NEVER
    if state.allowed_token_ids is not None:
        kept = logits[state.allowed_token_ids]
        logits.fill(_NEVER)
        logits[state.allowed_token_ids] = kept
    if state.bad_token_ids is not None:
        logits[state.bad_token_ids] = _NEVER
    if state.bad_sequences:
        logits[state.completing_ids()] = _NEVER
    if state.bars_stops(mask):
        logits[state.stop_token_ids] = _NEVER
    if state.bias_ids is not None:
        logits[state.bias_ids] += state.biases
    for processor, wants_prompt in state.logits_processors:
        # Copies, as a processor that edits its arguments must not edit the sequence.
        arguments = [state.tokens.prompt()] if wants_prompt else []
        _run_processor(processor, [*arguments, state.tokens.output()], torch.from_numpy(logits))
    if state.counts is not None:
        state.counts.update()
        _penalise(logits, state.params, state.counts.ids, state.counts.counts)


def _penalise(logits: Floats, params: SamplingParams, ids: Ids, counts: Floats) -> None:
    values = logits[ids]
    if params.repetition_penalty != 1.0:
        penalty = params.repetition_penalty
        positive = values > 0
        values[positive] /= penalty
        values[~positive] *= penalty
    if params.frequency_penalty != 0.0:
        values -= params.frequency_penalty * counts
    if params.presence_penalty != 0.0:
        values[counts > 0] -= params.presence_penalty
    logits[ids] = values


def _run_processor(processor: Callable[..., Any], arguments: list[Any], logits: torch.Tensor) -> None:
    name = getattr(processor, "__name__", type(processor).__name__)
    try:
        with torch.inference_mode():
            result = processor(*arguments, logits)
    except Exception as error:
        message = f"logits processor {name!r} raised {type(error).__name__}: {error}"
        # Code, not a parameter: whoever runs it must hear of it.
        raise RowError(message, FailureKind.INTERNAL) from error
    if result is logits:
        return
    if not isinstance(result, torch.Tensor) or result.shape != logits.shape or not result.is_floating_point():
        found = type(result).__name__
        if isinstance(result, torch.Tensor):
            found = f"a {result.dtype} tensor of shape {list(result.shape)}"
        wanted = f"logits, a floating-point tensor of shape {list(logits.shape)}"
        raise RowError(f"logits processor {name!r} must return {wanted}; it returned {found}.", FailureKind.INTERNAL)
    logits.copy_(result.detach())
