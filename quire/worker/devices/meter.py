"""How much memory a step's transient tensors take, and how long it takes, measured by real steps of a few tokens.

A device makes meters at start-up. Every tensor of a step has so many bytes a token or so many a sampled row, so
that two sizes say what any size takes: a step of the largest size would touch gigabytes, at 2.4 ms a MiB on the
reference machine, to find the same number. Memory is counted as it is asked for, and nothing large is touched.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
from torch import Tensor, autograd
from torch._C._profiler import _ExperimentalConfig
from tqdm import tqdm

from quire.attention.step import Step
from quire.models.causal_lm import RunnableModel
from quire.models.compiled import CompiledModel
from quire.worker.gather import INT, StepArrays

Result = TypeVar("Result")

BLOCK_SIZE = 16  # of the one block that the steps write
_FEW, _MORE = 4, 12  # tokens, and rows, of the two steps
_MOST_ROUNDS = 12


def peak_bytes(function: Callable[[], Result]) -> tuple[Result, int]:
    """What the function returns, and how many bytes of new tensors were alive at once while it ran on this thread.

    torch's allocator tells its old profiler, which starts in no time; the newer ones take a second and write to stderr.
    """
    old: Any = autograd  # whose profiler is not public any more
    memory_only = [old.ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()]
    old._enable_profiler_legacy(old.ProfilerConfig(*memory_only))
    try:
        result = function()
    finally:
        records = old._disable_profiler_legacy()
    alive = peak = 0
    for thread in records:
        for record in thread:
            if record.kind() == "memory_alloc":
                alive += record.cpu_memory_usage()
                peak = max(peak, alive)
    return result, peak


@dataclass(frozen=True)
class Meter:
    """Measures steps of one sequence, in a cache of one block.

    Attributes:
        upload: brings a step's arrays to where the model is, with that cache.
        num_groups: KV groups of a step.
        computing, clock: the device's.
    """

    model: RunnableModel
    upload: Callable[[StepArrays], tuple[Tensor, Step]]
    num_groups: int
    computing: Callable[[], AbstractContextManager[None]]
    clock: Callable[[], float]

    def activation_bytes(self, max_tokens: int, max_rows: int) -> int:
        """Memory of the transient tensors of a step of so many tokens, of which so many rows are sampled."""
        model = self.model
        if isinstance(model, CompiledModel) and (known := model.step_bytes(max_tokens, max_rows)) is not None:
            return known
        bodies, heads = list[int](), list[int]()
        with self.computing():
            for count in (_FEW, _MORE):
                ids, step = self.upload(self._sequences([count], count))
                hidden, body = peak_bytes(partial(model, ids, step))
                logits, head = peak_bytes(partial(model.compute_logits, hidden))
                bodies.append(body)
                heads.append(max(head, logits.nbytes))
        kept = model.num_bytes(max_tokens) if isinstance(model, CompiledModel) else 0
        return _at(bodies, max_tokens) + _at(heads, max_rows) + kept

    def step_seconds(self, sizes: Sequence[int], limit: float) -> dict[int, float]:
        """Seconds of a step of so many tokens, each of which is sampled: the least of a few rounds through the sizes.

        Once `limit` seconds are over nothing further is tried, but for the first two sizes. None takes longer than a
        larger one.
        """
        found: dict[int, float] = {}
        model, clock, start = self.model, self.clock, self.clock()
        with self.computing():
            for _ in range(_MOST_ROUNDS):
                for count in sizes:
                    begin = clock()
                    if len(found) >= 2 and begin - start > limit:
                        break
                    logits = model.compute_logits(model(*self.upload(self._sequences([count], count))))
                    logits[:1, :1].tolist()  # waits for a device
                    found[count] = min(clock() - begin, found.get(count, math.inf))
        largest_first = sorted(found, reverse=True)
        return dict(zip(largest_first, accumulate([found[count] for count in largest_first], min), strict=True))

    def _sequences(self, lengths: Sequence[int], context: int) -> StepArrays:
        """Sequences of so many tokens each, in block 0 all of them, with tables for a context of that length.

        All are at position 0: a model may have no other, and which it is costs nothing.
        """
        places = np.concatenate([np.arange(length, dtype=INT) for length in lengths])
        ends = np.cumsum([0, *lengths]).astype(INT)
        tables = [np.zeros((len(lengths), -(-context // BLOCK_SIZE)), INT)] * self.num_groups
        slots, zeros = [places % BLOCK_SIZE] * self.num_groups, np.zeros_like(places)
        return StepArrays(zeros, zeros, ends, np.diff(ends), tables, slots, BLOCK_SIZE)


@dataclass(frozen=True)
class DeviceMeter(Meter):
    """The same of a device whose memory costs nothing to touch: by the largest steps themselves.

    Attributes:
        num_seqs: most sequences of one token each.
        context: most tokens of one.
        captured: most tokens of a step that is captured as a graph, as graphs have memory of their own.
        peak_bytes: of the device.
        draw: draws from logits in every way that has kernels of its own, for nobody; None where none is compiled.
    """

    num_seqs: int
    context: int
    captured: int
    peak_bytes: Callable[[Callable[[], Any]], int]
    draw: Callable[[Tensor], Any] | None

    def activation_bytes(self, max_tokens: int, max_rows: int) -> int:
        draw = self.draw or (lambda logits: None)
        several = [[1] * min(size, self.num_seqs) for size in (1, 17, 33, 65)]
        several += [_parts(min(2**i + 1, max_tokens), self.context) for i in range(6, 20) if 2**i < max(65, max_tokens)]
        with self.computing():  # kernels are compiled for so many rows and more: nobody waits for them later
            for lengths in tqdm(several if self.draw else [], "Compiling kernels", leave=False, disable=None):
                rows = self.model(*self.upload(self._sequences(lengths, self.context)))
                draw(self.model.compute_logits(rows[: self.num_seqs]))
            most = [(_parts(min(n, max_tokens), BLOCK_SIZE), BLOCK_SIZE) for n in (max_tokens, self.captured) if n]
            steps = [self.upload(self._sequences(*each)) for each in (*most, ([1] * self.num_seqs, self.context))]
            found = [self.peak_bytes(partial(self.model, *each)) for each in steps]
            hidden = self.model(*steps[-1])[:1].expand(max_rows, -1).contiguous()
            found.append(self.peak_bytes(lambda: draw(self.model.compute_logits(hidden))))
        return sum(found)


def _parts(total: int, most: int) -> list[int]:
    """`total` in parts of `most` each, and what is left."""
    return [min(most, total - start) for start in range(0, total, most)]


def _at(measured: list[int], count: int) -> int:
    """The straight line through both measurements, at `count`."""
    slope = (measured[1] - measured[0]) / (_MORE - _FEW)
    return max(0, int(measured[0] + slope * (count - _FEW)))
