"""The CPU: the compiled kernels where they serve the model, or else plain torch.

The worker makes one. Weights are packed for the kernels, steps run as recorded programs on threads of their own, and
the KV cache lies in huge pages. Knows no plan and no row.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy

import torch
from torch import Tensor

from quire.attention.registry import select_backend
from quire.config.speculative import OPTION
from quire.config.worker import WorkerConfig
from quire.distributed.links import tensor_group
from quire.errors import ConfigError
from quire.models.causal_lm import CausalLM, RunnableModel
from quire.models.compiled import CompiledHeads, CompiledModel
from quire.models.compiled_eagle import CompiledEagle, RunnableHead
from quire.models.eagle import EagleHead
from quire.models.registry import DTYPES
from quire.ops.native.library import TORCH, Target, choose_level, default_num_threads, prefault, torch_threads
from quire.quantization.packed import Packing
from quire.quantization.registry import TypesByLayer, WeightFormats, select_formats
from quire.utils.host_memory import available_memory_bytes
from quire.utils.logs import logger
from quire.worker.devices.base import Device, block_parts
from quire.worker.gather import Ints
from quire.worker.pages import huge_pages, keep_freed_memory
from quire.worker.tuning import tune
from quire.worker.weights.store import WeightStore

# A model below this many parameters runs on one thread: its products take microseconds each, less than it takes to wake
# a second thread, and milliseconds less than waiting for one on a busy machine.
SMALL_MODEL = 16_000_000
# Activations touched at start-up, in tokens: the first use of a page costs as much as computing on it, here and there.
TOUCHED_ACTIVATIONS = 2048


class CpuDevice(Device):
    """This machine's processor and memory.

    Raises:
        ConfigError: kernels or a cache format that this machine or model can't have.
    """

    copied_bytes = 4 * 2**20

    def __init__(self, config: WorkerConfig) -> None:
        self.dtype = DTYPES[config.model.dtype]
        if config.tensor_size > 1:
            self.group = group = tensor_group(config)
            self.clock = lambda: group.agree(time.perf_counter())
        self.kernels = choose_level(config.kernels)
        if self.kernels != TORCH and self.dtype not in (torch.float32, torch.bfloat16):
            logger.warning("no compiled kernels for %s: plain torch, far slower than bfloat16", config.model.dtype)
            self.kernels = TORCH
        self.packs_weights = self.kernels != TORCH
        if config.kv_cache_dtype == "int8" and not self.packs_weights:
            raise ConfigError("kv_cache_dtype='int8' needs the compiled kernels, which this run does without.")
        if config.kv_cache_dtype == "fp8":
            raise ConfigError("kv_cache_dtype='fp8' is for GPUs; a CPU has 'int8'.")
        int8 = "-int8" if config.kv_cache_dtype == "int8" else ""
        self.backend = select_backend(f"native{int8}" if self.packs_weights else "reference", self.kernels)
        self._use_threads(default_num_threads())
        # No weight asks for gradients; in torch it is faster to say so, and beside kernels it costs more than it gives.
        self._no_gradients = nullcontext() if self.packs_weights else torch.inference_mode()

    def weight_formats(
        self, quantization: str | None, store: WeightStore, blocks: TypesByLayer | None
    ) -> WeightFormats:
        packing = Packing(self.dtype, store.allocate, store.filled, self.kernels) if self.packs_weights else None
        return select_formats(quantization, packing, blocks)

    def adopt(self, num_parameters: int) -> None:
        if num_parameters < SMALL_MODEL:
            self.is_small_model = self.num_threads > 1
            self._use_threads(1)

    def with_threads(self, num_threads: int) -> "CpuDevice":
        if not self.packs_weights:
            raise ConfigError(f"{OPTION}: num_threads is for the compiled kernels, not for torch; leave it out.")
        if num_threads > (num_cores := os.cpu_count() or 1):
            logger.warning("%s: num_threads=%d on %d cores: slower; lower it", OPTION, num_threads, num_cores)
        own = copy(self)
        own._use_threads(num_threads)
        return own

    def available_bytes(self) -> int:
        return available_memory_bytes()

    def compile(self, model: CausalLM, tapped: Sequence[int] = ()) -> RunnableModel:
        if self.target is None:
            return model
        if model.num_parameters >= SMALL_MODEL:
            tune(self.target)
        return CompiledModel(model, self.target, tapped)

    def compile_head(self, head: EagleHead, widths: Sequence[int]) -> RunnableHead:
        return CompiledEagle(head, widths, self.target) if self.packs_weights else super().compile_head(head, widths)

    def compile_heads(self, heads: Callable[[Tensor], Sequence[Tensor]], width: int) -> Callable[[Tensor], Tensor]:
        if self.packs_weights:
            return CompiledHeads(heads, width, self.dtype, self.target)
        return super().compile_heads(heads, width)

    def reserve(self, model: RunnableModel, max_tokens: int) -> None:
        if isinstance(model, CompiledModel):
            model.reserve(min(max_tokens, TOUCHED_ACTIVATIONS))

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, num_touched: int) -> Tensor:
        keep_freed_memory()
        cache = huge_pages(shape, dtype)
        if self.packs_weights:
            prefault(cache[:num_touched], self.num_threads)
            prefault(cache[num_touched : 8 * num_touched], 0)  # while the engine waits for requests
        return cache

    def allocate_host(self, num_blocks: int, block_bytes: int) -> Tensor:
        return huge_pages((num_blocks, block_bytes), torch.uint8)

    def copy(self, caches: Sequence[Tensor], host: Tensor, pairs: Sequence[tuple[int, int]], *, out: bool) -> None:
        for own, held in block_parts(caches, host):
            sources, destinations = (own.numpy(), held.numpy()) if out else (held.numpy(), own.numpy())
            for source, destination in pairs:
                destinations[destination] = sources[source]

    def computing(self) -> AbstractContextManager[None]:
        # The native kernels have threads of their own.
        if self.packs_weights or torch.get_num_threads() == self.num_threads:
            return self._no_gradients
        return _computing(self.num_threads)

    def send(self, arrays: Sequence[Ints]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        sent = [torch.from_numpy(array) for array in arrays]
        return sent, sent

    def take_rows(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        if len(rows) == hidden.shape[0] == len({*rows}):
            return hidden
        # Not by torch's indexing: it wakes OpenMP threads, which then spin on the cores that the kernels' own need.
        bits = hidden.view(torch.int32 if hidden.dtype.itemsize == 4 else torch.int16)
        return torch.from_numpy(bits.numpy()[rows]).view(hidden.dtype)

    def _use_threads(self, num_threads: int) -> None:
        """Compute on so many; where there are compiled kernels, tell them."""
        self.num_threads = num_threads
        self.target = Target(self.kernels, num_threads) if self.packs_weights else None


@contextmanager
def _computing(num_threads: int) -> Iterator[None]:
    with torch_threads(num_threads), torch.inference_mode():
        yield
