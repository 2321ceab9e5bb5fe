"""A worker: one device, its memory, its share of the model, and the runner that carries out steps on it.

Executors start workers and hand them plans. A worker knows the resolved configuration and no other worker; it never
sees a queue or a policy.
"""

import logging
import math

import torch

from quire.attention.registry import select_backend
from quire.config.engine_args import EngineConfig
from quire.errors import ConfigError
from quire.models.compiled import CompiledModel
from quire.models.registry import DTYPES, CausalLM, build_model
from quire.ops.native.library import TORCH, Target, choose_level, prefault
from quire.protocol.cache import MemoryReport
from quire.protocol.step import StepPlan, StepResult
from quire.quantization.registry import select_formats
from quire.utils.host_memory import available_memory_bytes
from quire.worker.pages import huge_pages, keep_freed_memory
from quire.worker.rows import RowTable
from quire.worker.runner import ModelRunner
from quire.worker.weights.cache import place_of
from quire.worker.weights.load import LoadReport, load_model_weights
from quire.worker.weights.store import StaleStoreError, WeightStore

# A model below this many parameters runs on one thread: its products take microseconds each, less than it takes to wake
# a second thread, and milliseconds less than waiting for one on a busy machine.
SMALL_MODEL = 16_000_000
# Memory touched at start-up, in tokens: the first use of a page costs as much as computing on it, on some machines.
TOUCHED_ACTIVATIONS = 2048
TOUCHED_TOKENS = 1024  # of the KV cache

logger = logging.getLogger(__name__)


class Worker:
    """Loads the model, reports memory, allocates the KV cache, executes plans."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        dtype = DTYPES[config.model.dtype]
        self.kernels = choose_level(config.args.kernels)
        if self.kernels != TORCH and dtype not in (torch.float32, torch.bfloat16):
            logger.info("no compiled kernels for %s: plain torch is used", config.model.dtype)
            self.kernels = TORCH
        native = self.kernels != TORCH
        if config.args.kv_cache_dtype == "int8" and not native:
            raise ConfigError("kv_cache_dtype='int8' needs the compiled kernels, which this run does without.")
        int8 = "-int8" if config.args.kv_cache_dtype == "int8" else ""
        self._backend = select_backend(f"native{int8}" if native else "reference")
        self._store: WeightStore | None = None
        self._model = self._build(native)
        self._runner: ModelRunner | None = None
        num_parameters = sum(math.prod(shape) for shape in self._model.checkpoint_shapes().values())
        self._num_threads = 1 if num_parameters < SMALL_MODEL else torch.get_num_threads()

    def _build(self, native: bool, keep: bool = True) -> CausalLM:
        """The model, its packed weights in the store where it is native."""
        args, model = self._config.args, self._config.model
        if not native:
            formats = select_formats(args.quantization, DTYPES[model.dtype], None)
            return build_model(model, self._backend, formats)
        place = None
        if keep and args.weight_cache and args.load_format != "dummy":
            place = place_of(model, args.quantization, int(args.weight_cache_size * 2**30))
        self._store = WeightStore(place)
        store, dtype = self._store, DTYPES[model.dtype]
        formats = select_formats(args.quantization, dtype, store.allocate, store.filled)
        try:
            return build_model(model, self._backend, formats)
        except StaleStoreError:  # removed, or where that is not allowed done without
            return self._build(native, keep=place is not None and not place.path.exists())

    def describe(self) -> str:
        """The kernels in use and why, and the threads, for the log."""
        wanted, args = self._config.args.kernels, self._config.args
        why = "as asked for" if wanted != "auto" else "the best that this machine has"
        if self.kernels == TORCH:
            why = "as asked for" if wanted == TORCH else "no compiled ones serve this model here: slower"
        small = ", as the model is small" if self._num_threads == 1 < torch.get_num_threads() else ""
        kept = "" if args.kv_cache_dtype == "auto" else f"; {args.kv_cache_dtype} KV cache"
        packed = "" if args.quantization is None else f"; {args.quantization} weights"
        return f"kernels: {self.kernels} ({why}); threads: {self._num_threads}{small}{packed}{kept}"

    def load(self, progress: bool = True) -> LoadReport:
        """Fill the model with its weights (ModelLoadError where they are missing or broken)."""
        args = self._config.args
        report = load_model_weights(self._model, self._config.model, load_format=args.load_format, progress=progress)
        if self._store is not None:
            self._store.finish()
        return report

    def memory_report(self) -> MemoryReport:
        """Measure what is free now that the weights are loaded."""
        model, scheduler = self._config.model, self._config.scheduler
        # Transient tensors, in fp32 to be safe: about a dozen of the hidden size per token, the MLP's two, and the
        # logits with the sampler's two copies for every sequence that may be sampled.
        per_token = 12 * model.hidden_size + 2 * model.intermediate_size
        activations = 4 * scheduler.max_num_batched_tokens * per_token
        activations += 4 * 3 * min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens) * model.vocab_size
        elements = math.prod(self._cache_shape(1)) * self._model.num_layers
        mapped = self._store.mapped_bytes if self._store is not None else 0
        return MemoryReport(
            available_bytes=max(0, available_memory_bytes() - mapped),
            activation_bytes=activations,
            block_bytes=elements * self._backend.kv_cache_dtype(self._model.dtype).itemsize,
        )

    def initialize_cache(self, num_blocks: int, max_model_len: int) -> None:
        """Allocate the KV cache; its pages cost memory once they are first written."""
        keep_freed_memory()
        shape, dtype = self._cache_shape(num_blocks), self._backend.kv_cache_dtype(self._model.dtype)
        caches = [huge_pages(shape, dtype) for _ in range(self._model.num_layers)]
        table = RowTable(self._config.scheduler.max_num_seqs, max_model_len, self._config.args.block_size)
        model: CausalLM | CompiledModel = self._model
        if self.kernels != TORCH:
            model = CompiledModel(self._model, Target(self.kernels, self._num_threads))
            model.reserve(min(self._config.scheduler.max_num_batched_tokens, TOUCHED_ACTIVATIONS))
            # The pool hands out its first blocks first.
            touched = min(num_blocks, TOUCHED_TOKENS // self._config.args.block_size)
            for cache in caches:
                prefault(cache[:touched], self._num_threads)
        self._runner = ModelRunner(model, self._backend, caches, table, poison=self._config.args.debug)

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one step, on this worker's number of threads; the process's own setting is left as it was."""
        runner = self.runner
        outside = torch.get_num_threads()
        if self.kernels != TORCH or outside == self._num_threads:  # the native kernels have threads of their own
            return runner.execute(plan)
        torch.set_num_threads(self._num_threads)
        try:
            return runner.execute(plan)
        finally:
            torch.set_num_threads(outside)

    @property
    def runner(self) -> ModelRunner:
        """What carries out the steps; there from `initialize_cache` on."""
        assert self._runner is not None, "initialize_cache comes first"
        return self._runner

    @property
    def model(self) -> torch.nn.Module:
        """The model itself, for `LLM.apply_model`."""
        if self._store is not None:
            self._store.settle()
        return self._model

    def check_integrity(self) -> None:
        """Raise AssertionError when the rows are inconsistent."""
        if self._runner is not None:
            self._runner.table.check_integrity()

    def _cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        model = self._model
        return self._backend.kv_cache_shape(
            num_blocks, self._config.args.block_size, model.num_kv_heads, model.head_dim
        )
