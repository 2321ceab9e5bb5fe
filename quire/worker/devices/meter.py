"""How much memory a step's transient tensors take, measured by real steps of a few tokens.

The CPU device asks it once at start-up. Every tensor of a step has so many bytes a token or so many a sampled row, so
that two sizes say what any size takes: a step of the largest size would touch gigabytes, at 2.4 ms a MiB on the
reference machine, to find the same number. Memory is counted as it is asked for, and nothing large is touched.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import (  # pyright: ignore[reportPrivateImportUsage]
    ProfilerConfig,  # pyright: ignore[reportPrivateImportUsage]
    ProfilerState,  # pyright: ignore[reportPrivateImportUsage]
    _disable_profiler_legacy,  # pyright: ignore[reportPrivateImportUsage]
    _enable_profiler_legacy,  # pyright: ignore[reportPrivateImportUsage]
)

from quire.layers.step import Step
from quire.worker.devices.base import RunnableModel
from quire.worker.gather import INT, StepArrays

Result = TypeVar("Result")

BLOCK_SIZE = 16  # of the one block that the steps write
_FEW, _MORE = 4, 12  # tokens, and rows, of the two steps
_MOST_ROUNDS = 12


def peak_bytes(function: Callable[[], Result]) -> tuple[Result, int]:
    """What the function returns, and how many bytes of new tensors were alive at once while it ran on this thread.

    torch's allocator tells its old profiler, which starts in no time; the newer ones take a second and write to stderr.
    """
    memory_only = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    _enable_profiler_legacy(memory_only)
    try:
        result = function()
    finally:
        records = _disable_profiler_legacy()
    alive = peak = 0
    for thread in records:
        for record in thread:
            if record.kind() == "memory_alloc":
                alive += record.cpu_memory_usage()
                peak = max(peak, alive)
    return result, peak


@torch.inference_mode()
def measure_activations(
    model: RunnableModel,
    upload: Callable[[StepArrays], tuple[Tensor, Step]],
    num_groups: int,
    max_tokens: int,
    max_rows: int,
) -> int:
    """Bytes of a step of `max_tokens` tokens of which `max_rows` are sampled, but for memory that the model keeps.

    `upload` brings a step's arrays, of `num_groups` KV groups, to where the model is, with a cache of one block.
    """
    bodies: list[int] = []
    heads: list[int] = []
    for count in (_FEW, _MORE):
        ids, step = upload(_one_sequence(count, num_groups))
        hidden, body = peak_bytes(partial(model, ids, step))
        _, head = peak_bytes(partial(model.compute_logits, hidden))
        bodies.append(body)
        heads.append(head)
    return _at(bodies, max_tokens) + _at(heads, max_rows)


@torch.inference_mode()
def measure_steps(
    model: RunnableModel,
    upload: Callable[[StepArrays], tuple[Tensor, Step]],
    num_groups: int,
    sizes: Sequence[int],
    limit: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, float]:
    """Seconds of a step of so many tokens, each of which is sampled: the least of a few rounds through the sizes.

    Once `limit` seconds are over nothing further is tried, but for the first two sizes. None takes longer than a larger
    one.
    """
    found: dict[int, float] = {}
    start = clock()
    for _ in range(_MOST_ROUNDS):
        for count in sizes:
            begin = clock()
            if len(found) >= 2 and begin - start > limit:
                break
            model.compute_logits(model(*upload(_one_sequence(count, num_groups))))
            found[count] = min(clock() - begin, found.get(count, math.inf))
    least = math.inf
    for count in sorted(found, reverse=True):
        found[count] = least = min(found[count], least)
    return found


def _one_sequence(num_tokens: int, num_groups: int) -> StepArrays:
    positions = np.arange(num_tokens, dtype=INT)
    return StepArrays(
        input_ids=np.zeros(num_tokens, INT),
        positions=positions,
        query_start_loc=np.array([0, num_tokens], INT),
        seq_lens=np.array([num_tokens], INT),
        block_tables=[np.zeros((1, -(-num_tokens // BLOCK_SIZE)), INT)] * num_groups,
        slot_mappings=[positions % BLOCK_SIZE] * num_groups,
        block_size=BLOCK_SIZE,
    )


def _at(measured: list[int], count: int) -> int:
    """The straight line through both measurements, at `count`."""
    slope = (measured[1] - measured[0]) / (_MORE - _FEW)
    return max(0, int(measured[0] + slope * (count - _FEW)))
