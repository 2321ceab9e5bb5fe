"""An NVIDIA GPU: Triton's kernels on tensors of its own, steps handed over while it computes the one before.

The worker makes one where `device` says so. Weights and KV cache lie in the GPU's memory, a step's numbers go there in
one copy, and its tokens are drawn there. Without Triton plain torch does the same work. Knows no plan and no row.
"""

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from quire.attention.registry import select_backend
from quire.config.speculative import OPTION
from quire.config.worker import WorkerConfig
from quire.errors import ConfigError
from quire.models.causal_lm import CausalLM, RunnableModel
from quire.models.registry import DTYPES
from quire.ops.native.library import TORCH
from quire.protocol.cache import LayerCache
from quire.quantization.registry import TypesByLayer, WeightFormats, select_formats
from quire.utils.logs import logger
from quire.worker.devices.base import Device, M, RowSampler, block_parts
from quire.worker.devices.graphs import SIZES, GraphedModel
from quire.worker.devices.meter import DeviceMeter, Meter
from quire.worker.devices.staging import Staging
from quire.worker.devices.stream import CudaStream
from quire.worker.gather import INT, Ints
from quire.worker.weights.store import WeightStore

TRITON = "triton"  # the level of its kernels
FP8_CAPABILITY = (8, 9)


class CudaDevice(Device):
    """The GPU that torch has chosen.

    Attributes:
        stream: its order of work.

    Args:
        stream: None for the current one.

    Raises:
        ConfigError: there is none that can be used, or options that it can't serve.
    """

    copied_bytes = 64 * 2**20

    def __init__(self, config: WorkerConfig, stream: CudaStream | None = None) -> None:
        if config.num_ranks > 1:
            raise ConfigError(f"device='cuda' has one rank so far, and not {config.num_ranks}; device='cpu' has them.")
        self._config, self.dtype = config, DTYPES[config.model.dtype]
        self.stream = stream or CudaStream()
        self.other_bytes = self.total_bytes() - self.available_bytes()
        self.kernels = _install(config, self.stream.device)
        self._check_fp8(config.kv_cache_dtype)
        self.backend = select_backend(_backend(config, self.kernels))
        self.draws = self.kernels == TRITON
        self._staging = Staging(self.stream)
        self._last_tokens = torch.zeros(2 * config.max_num_seqs, dtype=torch.int32, device=self.stream.device)

    def _check_fp8(self, kind: str | None) -> None:
        if kind == "fp8" and self.kernels == TRITON and self.stream.capability < FP8_CAPABILITY:
            needed, has = ("{}.{}".format(*each) for each in (FP8_CAPABILITY, self.stream.capability))
            raise ConfigError(f"fp8 needs compute capability {needed} (Ada, Hopper); this GPU has {has}: take 'int8'.")

    def place(self, build: Callable[[], M]) -> M:
        free = self.stream.free_bytes()
        try:
            with self.stream.device:
                return build()
        except torch.OutOfMemoryError as error:
            with torch.device("meta"):
                needed = sum(weight.nbytes for weight in build().parameters())
            fewer = "" if self._config.quantization else "quantization='int8' or 'int4', or "
            raise ConfigError(
                f"the weights take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} of the GPU's "
                f"{self.total_bytes() / 2**30:.1f} GiB are free. Take {fewer}device='cpu'; to load others while an "
                "engine runs, let it sleep first."
            ) from error

    def weight_formats(
        self, quantization: str | None, store: WeightStore, blocks: TypesByLayer | None
    ) -> WeightFormats:
        if not blocks:  # a checkpoint's own numbers are dequantized
            self._check_fp8(quantization)
        return select_formats(quantization, None, blocks, on_device=True)

    def with_threads(self, num_threads: int) -> "CudaDevice":
        raise ConfigError(f"{OPTION}: num_threads is for a CPU's kernels; leave it out.")

    def available_bytes(self) -> int:
        return self.stream.free_bytes()

    def total_bytes(self) -> int:
        return self.stream.total_bytes()

    def compile(self, model: CausalLM, tapped: Sequence[int] = ()) -> RunnableModel:
        config, is_eager = self._config, self._config.enforce_eager or self.kernels == TORCH
        is_eager |= any(getattr(each, "waits", False) for each in model.modules())  # mixtures of experts
        longest, block = config.model.max_model_len + config.max_num_drafts, config.block_size
        most = 0 if is_eager else min(config.max_num_seqs, SIZES[-1])
        sizes = {"max_size": most, "max_context": -(-longest // block) * block}
        return GraphedModel(model, self.stream, self.backend.build, self._last_tokens, **sizes)

    def meter(self, model: RunnableModel, layers: Sequence[LayerCache], num_groups: int) -> Meter:
        plain, config = super().meter(model, layers, num_groups), self._config
        most, context, peak = config.max_num_seqs, config.model.max_model_len, self.stream.peak_bytes
        draw = importlib.import_module("quire.ops.triton.sampler").rehearse if self.kernels == TRITON else None
        captured = model.most_tokens if isinstance(model, GraphedModel) else 0
        return DeviceMeter(**vars(plain), num_seqs=most, context=context, captured=captured, peak_bytes=peak, draw=draw)

    def reserve(self, model: RunnableModel, max_tokens: int) -> None:
        if isinstance(model, GraphedModel):
            model.reserve()

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, num_touched: int) -> Tensor:
        try:
            return torch.zeros(shape, dtype=dtype, device=self.stream.device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error

    def allocate_host(self, num_blocks: int, block_bytes: int) -> Tensor:
        try:
            return self.stream.pinned(num_blocks * block_bytes, torch.uint8).view(num_blocks, block_bytes)
        except RuntimeError as error:
            raise MemoryError(str(error)) from error

    def copy(self, caches: Sequence[Tensor], host: Tensor, pairs: Sequence[tuple[int, int]], *, out: bool) -> None:
        for own, held in block_parts(caches, host):
            sources, destinations = (own, held) if out else (held, own)
            for source, destination in pairs:
                destinations[destination].copy_(sources[source], non_blocking=True)
        self.stream.mark().synchronize()  # whoever reads or writes host blocks next does not ask the device

    def computing(self) -> AbstractContextManager[None]:
        self.stream.enter()
        return torch.inference_mode()

    def send(self, arrays: Sequence[Ints]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Triton's kernels are told of the step on the device, plain torch, which cuts it on the CPU, there."""
        sent = self._staging.upload(arrays)
        return sent, [torch.from_numpy(array) for array in arrays] if self.kernels == TORCH else sent

    def take_rows(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        if len(rows) == hidden.shape[0] == len({*rows}):
            return hidden
        [indices] = self._staging.upload([np.array(rows, INT)])
        return hidden.index_select(0, indices)

    def make_sampler(self, vocab_size: int) -> RowSampler:
        from quire.sampling.device import DeviceSampler  # with Triton, which may not be there

        return DeviceSampler(self._last_tokens, vocab_size)


def _install(config: WorkerConfig, device: torch.device) -> str:
    """Have the operations use Triton's kernels, if they can; the level of kernels."""
    if config.kernels not in ("auto", TORCH):
        raise ConfigError(f"kernels={config.kernels!r} are a CPU's: leave it out, or set device='cpu'.")
    if config.kernels == TORCH:
        return TORCH
    if importlib.util.find_spec("triton") is None:
        logger.warning("Triton is not installed: plain torch computes on the GPU, far slower (pip install triton)")
        return TORCH
    importlib.import_module("quire.ops.triton").install(device.type, fast_gemm=config.fast_gemm)
    return TRITON


def _backend(config: WorkerConfig, kernels: str) -> str:
    kind = config.kv_cache_dtype
    if kind != "auto" and kernels == TORCH:
        raise ConfigError(f"kv_cache_dtype={kind!r} needs Triton's kernels on a GPU, which this run does without.")
    return "reference" if kernels == TORCH else TRITON if kind == "auto" else f"{TRITON}-{kind}"
