"""The contract of a device: all that a worker and its runner leave to the place where they compute.

The worker makes one, builds and loads its model for it, and asks it for memory; the runner hands it each step's arrays
and takes hidden states from it. A device knows tensors and kernels, and neither plans nor rows.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from timeit import repeat
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from quire.attention.base import AttentionBackend, AttentionBatch, Tails
from quire.attention.step import Step
from quire.distributed.groups import Group
from quire.distributed.network import NetworkGroup
from quire.errors import ConfigError
from quire.models.causal_lm import CausalLM, RunnableModel
from quire.models.compiled_eagle import RunnableHead
from quire.models.eagle import EagleHead
from quire.ops.native.library import Target
from quire.protocol.cache import LayerCache
from quire.quantization.registry import TypesByLayer, WeightFormats
from quire.sampling.sampler import SamplerOutput
from quire.sampling.state import Mask, SamplingState
from quire.worker.devices.meter import BLOCK_SIZE, Meter
from quire.worker.gather import Ints, StepArrays
from quire.worker.weights.store import WeightStore

M = TypeVar("M", bound=nn.Module)


class RowSampler(Protocol):
    """Draws tokens where logits are, for persistent rows (`quire.sampling.device.DeviceSampler`)."""

    def can_draw(self, state: SamplingState) -> bool:
        """Whether it can draw for such a sequence, a token at a time."""
        ...

    def assign(self, row: int, state: SamplingState) -> None:
        """Give a row to a sequence, of whose tokens the host knows all."""
        ...

    def launch(
        self, logits: Tensor, rows: Sequence[int], positions: Sequence[int], masks: Sequence[Mask | None] | None = None
    ) -> Callable[[], SamplerOutput]:
        """Draw from row i of [N, V] logits for row `rows[i]` at that position of its output; waits for nothing.

        Whoever calls what it returns waits until all is drawn, and gets it by row, one token each.
        """
        ...


class Device(ABC):
    """One device.

    Attributes:
        kernels: the level of compiled kernels in use, "torch" for none.
        dtype: of activations.
        backend: the attention backend to build models with.
        packs_weights: weights lie packed in a store, of which a later start may map a file.
        num_threads: host threads that compute.
        group: of the ranks that share the model; None for one alone.
        clock: seconds, by rank 0's clock for all ranks: what follows from times is then the same on each.
        target: what compiled kernels run on, the sampler's, too; None where the sampler's alone are used, on what
            there is.
        draws: tokens are drawn where logits are, while the host goes on; it hears of them later.
        copied_bytes: at once, to measure copies.
        other_bytes: of its memory, what others had taken before it was made, where a share is of all of it.
        is_small_model: one thread computes although there are more, as the model is small.
    """

    kernels: str
    group: Group | NetworkGroup | None = None
    clock: Callable[[], float] = staticmethod(time.perf_counter)
    dtype: torch.dtype
    backend: AttentionBackend
    copied_bytes: int
    other_bytes: int = 0
    packs_weights: bool = False
    num_threads: int = 1
    is_small_model: bool = False
    draws: bool = False
    target: Target | None = None

    def place(self, build: Callable[[], M]) -> M:
        """What `build` makes, with its tensors where the device computes (ConfigError: there is no room)."""
        try:
            return build()
        except (OSError, RuntimeError) as error:
            if "allocate memory" not in str(error):
                raise
            raise ConfigError("there is no memory for the model: use a smaller one, or lower max_model_len.") from error

    @abstractmethod
    def weight_formats(
        self, quantization: str | None, store: WeightStore, blocks: TypesByLayer | None
    ) -> WeightFormats:
        """The formats that its kernels multiply, for a model about to be built; packed weights go to `store`.

        `blocks`: the types of a checkpoint's matrices that are kept as they are, by layer or part of one.
        """

    def adopt(self, num_parameters: int) -> None:  # noqa: B027 - on most nothing does
        """Settle what depends on the model's size, once it is built."""

    @abstractmethod
    def with_threads(self, num_threads: int) -> "Device":
        """This device, on which so many host threads compute what drafts (ConfigError where they can't be told)."""

    @abstractmethod
    def available_bytes(self) -> int:
        """Memory that is free for the KV cache and activations."""

    def total_bytes(self) -> int:
        """All of its memory, if it serves the engine alone; else 0."""
        return 0

    @abstractmethod
    def compile(self, model: CausalLM, tapped: Sequence[int] = ()) -> RunnableModel:
        """The loaded model as this device runs it; its steps may ask for the outputs of the layers `tapped`."""

    def compile_head(self, head: EagleHead, widths: Sequence[int]) -> RunnableHead:
        """A filled head likewise, that reads hidden states of such widths."""
        return head

    def compile_heads(self, heads: Callable[[Tensor], Sequence[Tensor]], width: int) -> Callable[[Tensor], Tensor]:
        """Functions of the same rows, in the model's type, as this device runs them: [R, width] -> [R, K, N]."""
        return lambda hidden: torch.stack(list(heads(hidden)), 1)

    def meter(self, model: RunnableModel, layers: Sequence[LayerCache], num_groups: int) -> Meter:
        """What measures steps, of so many KV groups, of a model whose caches are of such layers."""
        dtype = self.backend.kv_cache_dtype(self.dtype)
        caches = [self.allocate(self.cache_shape(layer, 1, BLOCK_SIZE), dtype, 0) for layer in layers]
        return Meter(model, partial(self.upload, caches=caches), num_groups, self.computing, self.clock)

    @abstractmethod
    def reserve(self, model: RunnableModel, max_tokens: int) -> None:
        """Make room for steps of so many tokens, before the first one."""

    def cache_shape(self, layer: LayerCache, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Of what `allocate` makes for a layer."""
        return self.backend.kv_cache_shape(num_blocks, block_size, layer.num_kv_heads, layer.head_dim)

    @abstractmethod
    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, num_touched: int) -> Tensor:
        """A zeroed KV cache of one layer, of which the first `num_touched` blocks are likely to be used soon.

        Eight times as many may be touched ahead of their use, while nothing is computed.

        Raises:
            MemoryError, OSError: there is not that much.
        """

    @abstractmethod
    def allocate_host(self, num_blocks: int, block_bytes: int) -> Tensor:
        """Host memory for swapped blocks, uint8 [num_blocks, block_bytes], from which copies go fast. Untouched.

        Raises:
            MemoryError, OSError: there is not that much.
        """

    @abstractmethod
    def copy(self, caches: Sequence[Tensor], host: Tensor, pairs: Sequence[tuple[int, int]], *, out: bool) -> None:
        """Copy blocks, as (source, destination), out to host memory, or else in from there.

        A host block has the caches' parts of a block one after another.
        """

    def copy_bytes_per_second(self) -> float:
        """How fast such copies are, measured."""
        num, size = 16, self.copied_bytes // 16
        host, cache = self.allocate_host(num, size).fill_(1), self.allocate((num, size), torch.uint8, num).fill_(1)
        seconds = repeat(lambda: self.copy([cache], host, [(i, i) for i in range(num)], out=True), repeat=4, number=1)
        return self.copied_bytes / sorted(seconds)[1]

    @abstractmethod
    def computing(self) -> AbstractContextManager[None]:
        """Entered around each step's work, never twice at once: no gradients, its own number of threads."""

    def upload(self, arrays: StepArrays, caches: Sequence[Tensor]) -> tuple[Tensor, Step]:
        """A step's token ids and all else that layers want to know. The arrays belong to the device from here on."""
        tail, num_groups = arrays.tails, len(arrays.block_tables)
        numbers = [arrays.input_ids, arrays.positions, arrays.query_start_loc, arrays.seq_lens]
        numbers += [*arrays.block_tables, *arrays.slot_mappings]
        if tail is not None:
            numbers += tail.starts, tail.counts, *tail.slots
        sent, told = self.send(numbers)
        tables, slots, ends = told[4:], told[4 + num_groups :], told[4 + 2 * num_groups :]
        metadata: list[Any] = []
        for group in range(num_groups):
            own = None if tail is None else Tails(ends[0], ends[1], ends[2 + group])
            batch = AttentionBatch(told[2], told[3], tables[group], slots[group], arrays.block_size, own)
            metadata.append(self.backend.build(batch))
        return sent[0], Step(sent[1], caches, metadata)

    @abstractmethod
    def send(self, arrays: Sequence[Ints]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Arrays as tensors of the device, and again where its attention backend is told of them."""

    @abstractmethod
    def take_rows(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        """Rows [R], ascending, perhaps repeated, of hidden states [T, H]; as they are, where that is each one once."""

    def make_sampler(self, vocab_size: int) -> RowSampler:
        """What draws tokens, of a device that `draws`."""
        raise NotImplementedError


def block_parts(caches: Sequence[Tensor], host: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each cache its blocks as rows of bytes, and the part of host blocks that is for them."""
    rows = [cache.view(torch.uint8).view(len(cache), -1) for cache in caches]
    return zip(rows, host.split([row.shape[1] for row in rows], 1), strict=True)
