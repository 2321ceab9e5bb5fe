"""From logits to tokens: one call per step for all sequences that draw in it.

The order for each row is vLLM's: raw logprobs (before anything), processing.py, temperature, min_p, top-k, top-p, draw;
greedy rows take the largest processed logit, the lowest id among equals. A row's outcome has the same bits alone or in
any batch, at any row, and from the compiled sampler (native.py, where there is one) or numpy. A row that can't be
sampled is reported in `errors`; the others go on. Called by the runner.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from quire.ops.native.library import Target, default_target
from quire.protocol.step import NO_TOKEN_LEFT, TokenLogprobs
from quire.sampling import native
from quire.sampling.logprobs import row_logprobs
from quire.sampling.processing import RowError, float32_array, process_logits
from quire.sampling.random import random_bits, random_bits_of
from quire.sampling.select import DrawTable, candidates, draw, weigh
from quire.sampling.state import Floats, SamplingState

logger = logging.getLogger(__name__)

_SMALL_VOCAB = 8192  # up to here rows are weighed together: one row is too little work for a call of its own
_GROUP_NUMEL = 2**18  # logits converted at once: 1 MiB, which stays in L2
_WEIGHED_NUMEL = 2**15  # logits weighed at once


@dataclass
class SamplerOutput:
    """What was drawn, by row of the logits."""

    token_ids: list[list[int]]  # one per sample; [] where the row failed
    logprobs: list[list[TokenLogprobs] | None]  # one per sample; None where not asked for
    errors: dict[int, str] = field(default_factory=dict)  # row -> why it failed


@dataclass(slots=True)
class _Pending:
    """A row that waits to be drawn together with others."""

    row: int
    state: SamplingState
    num_samples: int
    logits: Floats  # processed
    maximum: float


def sample(
    logits: Tensor, states: Sequence[SamplingState], num_samples: Sequence[int], target: Target | None = None
) -> SamplerOutput:
    """Choose the next token or tokens of each sequence. Appends nothing to the states.

    Where that breaks, each row is sampled by itself, so that only one that breaks by itself fails.

    Args:
        logits: [R, V], any float type.
        states: one per row.
        num_samples: one per row. Where it is > 1, sample j is drawn as sequence `sequence_index` + j would.
        target: threads of the compiled sampler; default: `default_target`. The result is the same on any.
    """
    assert logits.shape[0] == len(states) == len(num_samples)
    try:
        return _sample(logits, states, num_samples, target)
    except Exception as error:
        logger.exception("sampling %d rows broke", len(states))
        if len(states) == 1:
            return SamplerOutput([[]], [None], {0: f"{type(error).__name__} while its token was chosen"})
    output = SamplerOutput([], [])
    for row, state in enumerate(states):
        one = sample(logits[row : row + 1], [state], num_samples[row : row + 1], target)
        output.token_ids += one.token_ids
        output.logprobs += one.logprobs
        output.errors.update((row, message) for message in one.errors.values())
    return output


def _sample(
    logits: Tensor, states: Sequence[SamplingState], num_samples: Sequence[int], target: Target | None
) -> SamplerOutput:
    logits = logits.cpu()
    output = SamplerOutput([[] for _ in states], [None] * len(states))
    rows: Sequence[int] = range(len(states))
    if native.library() is not None:
        can = [row for row in rows if not states[row].logits_processors]
        if can:
            _sample_natively(target or default_target(), logits, states, num_samples, can, output)
        rows = [row for row in rows if states[row].logits_processors] if len(can) < len(states) else []
    if rows:
        _sample_in_numpy(logits, states, num_samples, rows, output)
    for row, state in enumerate(states):
        if state.num_logprobs is not None and output.logprobs[row] is None and output.token_ids[row]:
            raw = float32_array(logits[row])
            output.logprobs[row] = row_logprobs(raw, output.token_ids[row], state.num_logprobs)
    return output


def _sample_natively(
    target: Target,
    logits: Tensor,
    states: Sequence[SamplingState],
    num_samples: Sequence[int],
    rows: Sequence[int],
    output: SamplerOutput,
) -> None:
    if len(rows) < len(states):
        states, num_samples = [states[row] for row in rows], [num_samples[row] for row in rows]
    token_ids, errors, logprobs = native.sample_rows(target, logits, states, num_samples, rows)
    for i, row in enumerate(rows):
        output.token_ids[row] = token_ids[i]
    for i, code in errors.items():
        output.errors[rows[i]] = _unusable(native.MAXIMA[code])
    for i, entries in logprobs.items():
        output.logprobs[rows[i]] = entries


def _sample_in_numpy(
    logits: Tensor,
    states: Sequence[SamplingState],
    num_samples: Sequence[int],
    rows: Sequence[int],
    output: SamplerOutput,
) -> None:
    whole = logits.dtype == torch.float32 or logits.numel() <= _GROUP_NUMEL
    matrix = float32_array(logits) if whole else None
    if matrix is not None and len(rows) == len(states) and all(s.greedy and not s.processes for s in states):
        _choose_greedy(matrix, num_samples, output)
        return
    pending: list[_Pending] = []
    for row in rows:
        state = states[row]
        try:
            processed = _processed(float32_array(logits[row]) if matrix is None else matrix[row], state)
            if state.greedy:
                output.token_ids[row] = [_largest(processed)[0]] * num_samples[row]
            elif state.truncates or len(processed) > _SMALL_VOCAB:
                output.token_ids[row] = _choose(processed, state, num_samples[row])
            else:
                pending.append(_Pending(row, state, num_samples[row], processed, _largest(processed)[1]))
        except RowError as error:
            output.errors[row] = str(error)
    _draw_pending(pending, output)


def _choose_greedy(logits: Floats, num_samples: Sequence[int], output: SamplerOutput) -> None:
    """All rows of [R, V] at once. numpy takes the first of equal maxima, and the first NaN if there is one."""
    chosen = logits.argmax(1)
    finite = np.isfinite(logits[np.arange(len(chosen)), chosen]).tolist()
    for row, token_id in enumerate(chosen.tolist()):
        if finite[row]:
            output.token_ids[row] = [token_id] * num_samples[row]
        else:
            output.errors[row] = _unusable(float(logits[row, token_id]))


def _processed(logits: Floats, state: SamplingState) -> Floats:
    if not state.processes:
        return logits
    logits = logits.copy()
    process_logits(logits, state)
    return logits


def _largest(logits: Floats) -> tuple[int, float]:
    """Index and value of the largest logit, lowest index among equals."""
    index = int(logits.argmax())
    value = float(logits[index])
    if not math.isfinite(value):
        raise RowError(_unusable(value))
    return index, value


def _choose(logits: Floats, state: SamplingState, num_samples: int) -> list[int]:
    """Tokens drawn from one row, [V]."""
    maximum = _largest(logits)[1]
    if state.truncates:
        table, mass = candidates(logits, maximum, state.temperature, state.top_k, state.top_p, state.min_p)
    else:
        table, mass = DrawTable(None, weigh(logits, maximum, state.temperature)), 0
    tokens: list[int] = []
    for index in range(state.sequence_index, state.sequence_index + num_samples):
        bits = partial(random_bits, state.seed, index, state.position)
        tokens.append(draw(table, mass, logits, bits))
    return tokens


def _draw_pending(pending: list[_Pending], output: SamplerOutput) -> None:
    """Draw by temperature alone, weighing several rows in one call."""
    size = max(1, _WEIGHED_NUMEL // len(pending[0].logits)) if pending else 1
    for start in range(0, len(pending), size):
        group = pending[start : start + size]
        maxima = np.array([[p.maximum] for p in group], np.float32)
        temperatures = np.array([[p.state.temperature] for p in group], np.float32)
        weights = weigh(np.stack([p.logits for p in group]), maxima, temperatures)
        keys = [
            (p.state.seed, p.state.sequence_index + j, p.state.position) for p in group for j in range(p.num_samples)
        ]
        bits = iter(random_bits_of(keys))
        for p, row_weights in zip(group, weights, strict=True):
            table = DrawTable(None, row_weights)
            output.token_ids[p.row] = [table.pick(b) for b in islice(bits, p.num_samples)]


def _unusable(maximum: float) -> str:
    """Why a row whose largest logit isn't finite can't be sampled."""
    if maximum == -math.inf:
        return NO_TOKEN_LEFT
    return f"the logits are not finite (the largest is {maximum})."
