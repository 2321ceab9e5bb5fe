"""A worker: one device, its memory, its share of the model, and the runner that carries out steps on it.

Executors start workers and hand them plans. A worker knows the resolved configuration and no other worker; it never
sees a queue or a policy.
"""

import math

import torch

from quire.attention.registry import select_backend
from quire.config.engine_args import EngineConfig
from quire.models.registry import build_model
from quire.protocol import StepPlan, StepResult
from quire.utils.memory import available_memory_bytes
from quire.worker.memory import MemoryReport, keep_freed_memory
from quire.worker.model_runner import ModelRunner
from quire.worker.rows import RowTable
from quire.worker.weight_loader import LoadReport, load_model_weights

# A model below this many parameters runs on one thread: its products take microseconds each, less than it takes to wake
# a second thread, and milliseconds less than waiting for one on a busy machine.
SMALL_MODEL = 16_000_000


class Worker:
    """Loads the model, reports memory, allocates the KV cache, executes plans."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._backend = select_backend()
        self._model = build_model(config.model, self._backend)
        self._runner: ModelRunner | None = None
        num_parameters = sum(p.numel() for p in self._model.parameters())
        self._num_threads = 1 if num_parameters < SMALL_MODEL else torch.get_num_threads()

    def load(self, progress: bool = True) -> LoadReport:
        """Fill the model with its weights (ModelLoadError where they are missing or broken)."""
        return load_model_weights(
            self._model, self._config.model, load_format=self._config.args.load_format, progress=progress
        )

    def memory_report(self) -> MemoryReport:
        """Measure what is free now that the weights are loaded."""
        model, scheduler = self._config.model, self._config.scheduler
        # Transient tensors, in fp32 to be safe: about a dozen of the hidden size per token, the MLP's two, and the
        # logits with the sampler's two copies for every sequence that may be sampled.
        per_token = 12 * model.hidden_size + 2 * model.intermediate_size
        activations = 4 * scheduler.max_num_batched_tokens * per_token
        activations += 4 * 3 * min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens) * model.vocab_size
        elements = math.prod(self._cache_shape(1)) * self._model.num_layers
        return MemoryReport(
            available_bytes=available_memory_bytes(),
            activation_bytes=activations,
            block_bytes=elements * self._model.dtype.itemsize,
        )

    def initialize_cache(self, num_blocks: int, max_model_len: int) -> None:
        """Allocate the KV cache; its pages cost memory once they are first written."""
        keep_freed_memory()
        caches = [
            torch.empty(self._cache_shape(num_blocks), dtype=self._model.dtype) for _ in range(self._model.num_layers)
        ]
        table = RowTable(self._config.scheduler.max_num_seqs, max_model_len, self._config.args.block_size)
        self._runner = ModelRunner(self._model, self._backend, caches, table, poison=self._config.args.debug)

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one step, on this worker's number of threads; the process's own setting is left as it was."""
        assert self._runner is not None, "initialize_cache comes first"
        outside = torch.get_num_threads()
        if outside == self._num_threads:
            return self._runner.execute(plan)
        torch.set_num_threads(self._num_threads)
        try:
            return self._runner.execute(plan)
        finally:
            torch.set_num_threads(outside)

    @property
    def model(self) -> torch.nn.Module:
        """The model itself, for `LLM.apply_model`."""
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
