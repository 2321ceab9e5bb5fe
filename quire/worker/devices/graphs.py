"""Steps of not too many tokens as captured graphs: hundreds of kernels are handed over in one call.

The CUDA device wraps its model in this. A graph is captured when a step of its size first comes: for a number of
tokens, of sequences and a longest context out of a table each, to which steps are padded with tokens and sequences
that read and write nothing. All else runs as it is. Bits are the same both ways. Knows no plan.
"""

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
from quire.utils.logs import logger
from quire.worker.devices.stream import CudaStream

# Sequences of one token each.
SIZES = (1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 513, 32), *range(576, 1025, 64))
# Tokens where some have more: of a step of more the device has enough to do while kernels are handed over.
TOKENS = (16, 32, *range(64, 513, 64), *range(640, 1025, 128), *range(1280, 2049, 256))
FEW = 2  # sequences that such tokens may be of; or else all that there can be
CONTEXTS = tuple(1024 * 4**i for i in range(6))  # tokens of the longest one

Build = Callable[[AttentionBatch], Any]
Key = tuple[int, int, bool, int]  # of a graph: tokens, sequences, whether those have one each, the longest context


@dataclass(eq=False)
class _Graph:
    """One captured step.

    Attributes:
        ids, positions, batches: what it reads, of as many tokens and sequences as it has rows.
        hidden: [tokens, H], what it writes.
        has_one_each: whether each sequence has one token; else `query_start_loc`, which batches share, is read, too.
        used: tokens and sequences that the last step filled, or one that was interrupted may have.
    """

    ids: Tensor
    positions: Tensor
    batches: list[AttentionBatch]
    hidden: Tensor
    replay: Callable[[], None]
    has_one_each: bool
    used: tuple[int, int] = (0, 0)

    def run(self, ids: Tensor, positions: Tensor, batches: Sequence[AttentionBatch]) -> Tensor:
        """Hidden states of a step's tokens."""
        size, num = len(ids), len(batches[0].seq_lens)
        starts, (last_size, last_num) = self.batches[0].query_start_loc, self.used
        self.used = max(size, last_size), max(num, last_num)
        self.ids[:size].copy_(ids)
        self.positions[:size].copy_(positions)
        if not self.has_one_each:
            starts[: num + 1].copy_(batches[0].query_start_loc)
            starts[num + 1 :].fill_(size)
        for mine, given in zip(self.batches, batches, strict=True):
            mine.seq_lens[:num].copy_(given.seq_lens)
            mine.slot_mapping[:size].copy_(given.slot_mapping)
            mine.block_tables[:num, : given.block_tables.shape[1]].copy_(given.block_tables)
            mine.seq_lens[num:last_num].fill_(0)  # those of an earlier step, which are none of this
            mine.slot_mapping[size:last_size].fill_(-1)
        self.used = size, num
        self.replay()
        return self.hidden[:size]


class GraphedModel:
    """Token ids -> hidden states -> logits, as `CausalLM`; ids below 0 are taken from `last_tokens`.

    Attributes:
        most_tokens: of a step that is captured.

    Args:
        stream: the device's.
        build: the attention backend's; what it makes of a batch is that itself, or has it as `batch`.
        last_tokens: int32 [rows], the token that was drawn last for each row of the worker; id -1 - r means that of r.
        max_size: most sequences of a graph; 0 for no graphs at all. There are none before `reserve` is called.
        max_context: tokens of the longest sequence that can come.
    """

    def __init__(
        self, model: CausalLM, stream: CudaStream, build: Build, last_tokens: Tensor, *, max_size: int, max_context: int
    ) -> None:
        self.vocab_size, self.cache_layers = model.vocab_size, model.cache_layers
        self._model, self._stream, self._build, self._last_tokens = model, stream, build, last_tokens
        self._sizes = table(SIZES, max_size)
        self._contexts = table(CONTEXTS, max_context)
        self._graphs: dict[Key, _Graph] = {}
        self._pool: list[Any] = []
        self._most, self._captures = max_size, False
        self.most_tokens = TOKENS[-1] if max_size else 0

    def compute_logits(self, hidden: Tensor, adapters: AdapterBatch | None = None) -> Tensor:
        """[R, H] -> [R, V]."""
        return self._model.compute_logits(hidden, adapters)

    def reserve(self) -> None:
        """From now on steps are captured: what measures has had its own."""
        self._captures = self._most > 0

    def __call__(self, input_ids: Tensor, step: Step) -> Tensor:
        """Hidden states [T, H] of a step's tokens, whose keys and values are written to the caches."""
        batches: list[AttentionBatch] = [getattr(each, "batch", each) for each in step.attention]
        asks = step.adapters, step.taps, step.incoming, step.outgoing, batches[0].tails
        size = self._size(len(input_ids), len(batches[0].seq_lens))
        if size is None or any(each is not None for each in asks):
            return self._model(self._known(input_ids), step)
        longest = max(batch.block_tables.shape[1] * batch.block_size for batch in batches)
        key = *size, fitting(self._contexts, longest)
        if (graph := self._graphs.get(key)) is None and self._captures:
            try:
                graph = self._graphs[key] = self._capture(key, batches, step)
            except torch.OutOfMemoryError:
                logger.warning("no memory for more graphs: further steps run kernel by kernel")
                self._captures = False
        if graph is None:
            return self._model(self._known(input_ids), step)
        return graph.run(input_ids, step.positions, batches)

    def _known(self, ids: Tensor) -> Tensor:
        """The ids, those among them that the host has not heard of yet included."""
        return torch.where(ids < 0, self._last_tokens.index_select(0, (-1 - ids).clamp_(min=0)), ids)

    def _size(self, num_tokens: int, num: int) -> tuple[int, int, bool] | None:
        """Tokens and sequences of the graph for so many, and whether they have one each; None where there is none."""
        if num > self._most or num_tokens > max(num, self.most_tokens):
            return None
        has_one_each = num_tokens == num
        most = fitting(self._sizes, num) if has_one_each or num <= FEW else self._most
        return (most if has_one_each else fitting(TOKENS, num_tokens)), most, has_one_each

    def _capture(self, key: Key, batches: Sequence[AttentionBatch], step: Step) -> _Graph:
        size, num, has_one_each, context = key

        def numbers(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=self._stream.device)

        ids, positions, starts = numbers(size), numbers(size), numbers(num + 1)
        if has_one_each:
            starts = torch.arange(num + 1, dtype=torch.int32, device=self._stream.device)
        own: list[AttentionBatch] = []
        for batch in batches:
            tables = numbers(num, -(-context // batch.block_size))
            own.append(AttentionBatch(starts, numbers(num), tables, numbers(size, value=-1), batch.block_size))

        def compute() -> Tensor:
            return self._model(self._known(ids), Step(positions, step.caches, [self._build(batch) for batch in own]))

        told = f"Capturing a graph for {size} tokens of {num} sequences of at most {context} tokens"
        with tqdm(total=1, desc=told, leave=False, disable=None):  # seconds, where kernels are compiled first
            hidden, replay = self._stream.capture(compute, self._pool)
        logger.info("%s: done", told)
        return _Graph(ids, positions, own, hidden, replay, has_one_each)


def table(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """Of the sizes those below `most`, and that itself."""
    return (*(size for size in sizes if size < most), most)


def fitting(sizes: Sequence[int], needed: int) -> int:
    """The smallest of some ascending sizes that is enough."""
    return sizes[bisect_left(sizes, needed)]
