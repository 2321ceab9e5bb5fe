"""Steps that compute one token of each sequence as captured graphs: hundreds of kernels are handed over in one call.

The CUDA device wraps its model in this. A graph is captured when a step of its size first comes: for a number of
sequences and a longest context out of a table each, to which steps are padded with rows that read and write nothing.
All else runs as it is. Bits are the same both ways. Knows no plan.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from quire.attention.base import AttentionBatch
from quire.attention.step import AdapterBatch, Step
from quire.models.causal_lm import CausalLM
from quire.worker.devices.stream import CudaStream

SIZES = (1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 513, 32))  # sequences of a graph
CONTEXTS = tuple(1024 * 4**i for i in range(6))  # tokens of the longest one

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Graph:
    """One captured step.

    Attributes:
        ids, positions, batches: what it reads, of as many sequences as it has rows.
        hidden: [rows, H], what it writes.
        num_used: rows that the last step filled.
    """

    ids: Tensor
    positions: Tensor
    batches: list[AttentionBatch]
    hidden: Tensor
    replay: Callable[[], None]
    num_used: int = 0

    def run(self, ids: Tensor, positions: Tensor, batches: Sequence[AttentionBatch]) -> Tensor:
        """Hidden states of one token of each sequence."""
        size = len(ids)
        self.ids[:size].copy_(ids)
        self.positions[:size].copy_(positions)
        for mine, given in zip(self.batches, batches, strict=True):
            mine.seq_lens[:size].copy_(given.seq_lens)
            mine.slot_mapping[:size].copy_(given.slot_mapping)
            mine.block_tables[:size, : given.block_tables.shape[1]].copy_(given.block_tables)
            if size < self.num_used:  # rows of an earlier step, which are none of this
                mine.seq_lens[size : self.num_used].fill_(0)
                mine.slot_mapping[size : self.num_used].fill_(-1)
        self.num_used = size
        self.replay()
        return self.hidden[:size]


@dataclass(frozen=True)
class Run:
    """Where and how a model runs.

    Attributes:
        stream: the device's.
        build: the attention backend's; what it makes of a batch is that itself, or has it as `batch`.
    """

    stream: CudaStream
    build: Callable[[AttentionBatch], Any]


class GraphedModel:
    """Token ids -> hidden states -> logits, as `CausalLM`; ids below 0 are taken from `last_tokens`.

    Args:
        last_tokens: int32 [rows], the token that was drawn last for each row of the worker; id -1 - r means that of r.
        max_size: most sequences of a graph; 0 for no graphs at all. There are none before `reserve` is called.
        max_context: tokens of the longest sequence that can come.
    """

    def __init__(self, model: CausalLM, run: "Run", last_tokens: Tensor, *, max_size: int, max_context: int) -> None:
        self.vocab_size = model.vocab_size
        self.cache_layers = model.cache_layers
        self._model, self._run, self._last_tokens = model, run, last_tokens
        self._sizes = table(SIZES, max_size)
        self._contexts = table(CONTEXTS, max_context)
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._pool: list[Any] = []
        self._most, self._captures = max_size, False

    def compute_logits(self, hidden: Tensor, adapters: AdapterBatch | None = None) -> Tensor:
        """[R, H] -> [R, V]."""
        return self._model.compute_logits(hidden, adapters)

    def reserve(self) -> None:
        """From now on steps are captured: what measures has had its own."""
        self._captures = self._most > 0

    def __call__(self, input_ids: Tensor, step: Step) -> Tensor:
        """Hidden states [T, H] of a step's tokens, whose keys and values are written to the caches."""
        batches: list[AttentionBatch] = [getattr(each, "batch", each) for each in step.attention]
        size, asks = len(input_ids), (step.adapters, step.taps, step.incoming, step.outgoing, batches[0].tails)
        is_plain = all(each is None for each in asks) and size == len(batches[0].seq_lens)
        if not is_plain or size > self._most:
            return self._model(self._known(input_ids), step)
        longest = max(batch.block_tables.shape[1] * batch.block_size for batch in batches)
        key = fitting(self._sizes, size), fitting(self._contexts, longest)
        if (graph := self._graphs.get(key)) is None and self._captures:
            try:
                graph = self._graphs[key] = self._capture(*key, batches, step)
            except torch.OutOfMemoryError:
                logger.warning("no memory for more graphs: further steps run kernel by kernel")
                self._captures = False
        if graph is None:
            return self._model(self._known(input_ids), step)
        return graph.run(input_ids, step.positions, batches)

    def _known(self, ids: Tensor) -> Tensor:
        """The ids, those among them that the host has not heard of yet included."""
        return torch.where(ids < 0, self._last_tokens.index_select(0, (-1 - ids).clamp_(min=0)), ids)

    def _capture(self, size: int, context: int, batches: Sequence[AttentionBatch], step: Step) -> _Graph:
        stream = self._run.stream

        def numbers(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=stream.device)

        starts = torch.arange(size + 1, dtype=torch.int32, device=stream.device)
        ids, positions = numbers(size), numbers(size)
        own: list[AttentionBatch] = []
        for batch in batches:
            tables = numbers(size, -(-context // batch.block_size))
            own.append(AttentionBatch(starts, numbers(size), tables, numbers(size, value=-1), batch.block_size))

        def compute() -> Tensor:
            metadata = [self._run.build(batch) for batch in own]
            return self._model(self._known(ids), Step(positions, step.caches, metadata))

        told = f"Capturing a graph for {size} sequences of at most {context} tokens"
        with tqdm(total=1, desc=told, leave=False, disable=None):  # seconds, where kernels are compiled first
            hidden, replay = stream.capture(compute, self._pool)
        logger.info("%s: done", told)
        return _Graph(ids, positions, own, hidden, replay)


def table(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """Of the sizes those below `most`, and that itself."""
    return (*(size for size in sizes if size < most), most)


def fitting(sizes: Sequence[int], needed: int) -> int:
    """The smallest of some ascending sizes that is enough."""
    return sizes[bisect_left(sizes, needed)]
