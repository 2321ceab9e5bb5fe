"""A worker: one device, its memory, its share of the model, and the runner that carries out steps on it.

Executors start workers and hand them plans. A worker knows its own configuration and no other worker; it never sees
a queue or a policy.
"""

import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec import structs

from quire.config.worker import WorkerConfig
from quire.distributed.links import AnyLink, open_link
from quire.errors import ConfigError
from quire.lora.slots import LoraSlots
from quire.ops.native.library import TORCH
from quire.protocol.cache import CacheLayout, CacheReport, group_layers
from quire.protocol.step import SampleGuide, StepPlan, StepResult
from quire.protocol.worker import CallReply, CheckIntegrity, PlaceAdapters, WorkerReply, WorkerReport
from quire.sampling.accept import Rule
from quire.speculative.base import Proposer
from quire.speculative.ngram import NgramProposer
from quire.speculative.pace import Pace, StepCosts
from quire.speculative.suffix import SuffixProposer
from quire.worker.adapters import Adapters
from quire.worker.ahead import Ahead
from quire.worker.blockfiles import BlockFiles, BlockFolder
from quire.worker.cache import KVCache
from quire.worker.devices.base import Device
from quire.worker.devices.select import make_device
from quire.worker.draft import DraftModel
from quire.worker.drafting import Drafter
from quire.worker.eagle import EagleModel
from quire.worker.fingerprint import kv_fingerprint
from quire.worker.judging import Judge
from quire.worker.medusa import MedusaModel
from quire.worker.rows import RowTable
from quire.worker.runner import ModelRunner
from quire.worker.speculation import Speculation
from quire.worker.tiers import DiskCache, HostCache
from quire.worker.weights.build import build_packed
from quire.worker.weights.load import load_model_weights

PACE_SIZES = [1, 4, 2, 8, 3, 16, 5, 32, 6, 12, 64, 24, 48, 96]  # tokens of the steps that are timed, in this order
PACE_SECONDS = 0.05  # for all of them
HOST_SECONDS = 3e-5  # of a step besides, however many tokens it brings; what each token costs, drafts do not save
PROPOSER_SECONDS = {1: 5e-6, 2: 8e-6}  # by sequences, of what drafts without a model: a first guess
_NO_RESULT = StepResult(step_id=-1, results=[])
TOUCHED_TOKENS = 1024  # of the KV cache at start-up: the first use of a page is slow
# By method, what drafts with a model of its own.
DRAFTERS = {"draft_model": DraftModel, "medusa": MedusaModel, "eagle": EagleModel, "eagle3": EagleModel}
PROPOSERS = {"ngram": NgramProposer, "suffix": SuffixProposer}  # likewise, what drafts without one


@dataclass
class Place:
    """What is left of a worker that sleeps: where it computes, and meets its neighbours; how its KV cache was."""

    device: Device
    links: tuple[AnyLink | None, AnyLink | None] | None = None
    layout: CacheLayout | None = None


class Worker:
    """Loads the model, reports memory, allocates the KV cache, executes plans.

    Args:
        config: what it runs.
        place: that of an earlier worker, which this one takes.

    Raises:
        ConfigError, ModelLoadError: options that the device, or a model that this version, can't have.
    """

    def __init__(self, config: WorkerConfig, place: Place | None = None) -> None:
        if config.kv_cache_dir is not None and config.num_ranks > 1:
            raise ConfigError(f"kv_cache_dir: {config.num_ranks} ranks can't keep blocks there yet; leave it out.")
        self._config = config
        self.place = place or Place(make_device(config))
        self.device: Device = self.place.device
        self._model, self._store = build_packed(config, config.model, config.quantization, self.device, True)
        self._drafter: Drafter | None = None
        if (wanted := config.speculative) is not None and wanted.method in DRAFTERS and config.stage.is_last:
            num_threads = wanted.num_threads
            own = self.device if num_threads is None else self.device.with_threads(num_threads)
            self._drafter = DRAFTERS[wanted.method](config, wanted, own, self._model)
        self._layers = [*self._model.cache_layers, *(self._drafter.layers if self._drafter is not None else ())]
        windows = config.model.layer_windows + (config.draft.layer_windows if config.draft is not None else ())
        self._groups = group_layers(self._layers, windows if config.num_stages > 1 else ())
        self._model.assign_groups(self._groups, 0)
        if self._drafter is not None and self._drafter.layers:
            self._drafter.assign_groups(self._groups, len(self._model.cache_layers))
        self._runner: ModelRunner | None = None
        self._adapters: Adapters | None = None
        self._files: BlockFiles | None = None
        self._disk: DiskCache | None = None
        self._later: deque[StepPlan] = deque()  # not begun, as the last stage's sampling of another comes first
        self.device.adopt(self._model.num_parameters)

    def load(self, progress: bool = True) -> WorkerReport:
        """Fill the model with its weights (ModelLoadError where they are missing or broken)."""
        config, device = self._config, self.device
        loaded = load_model_weights(self._model, config.model, load_format=config.load_format, progress=progress)
        self._store.finish()
        if config.max_loras:
            name, most, rank = self._model.form.checkpoint_name, config.max_loras, config.max_lora_rank
            like = next(self._model.parameters()).new_empty(0, dtype=self._model.dtype)
            self._model.lora = LoraSlots(self._model, name, most, rank, like=like, native=device.packs_weights)
            self._adapters = Adapters(self._model, config.max_cpu_loras)
        self._runnable = device.compile(self._model, self._drafter.taps if self._drafter is not None else ())
        held = [*self._model.parameters()]
        if self._drafter is not None:
            held += self._drafter.module.parameters()
            if config.load_format != "none":
                self._drafter.load(progress)
        unasked = "unserved" if device.kernels == TORCH else "best"
        return WorkerReport(
            kernels=device.kernels,
            kernels_reason="asked" if device.kernels == config.kernels else unasked,
            num_threads=device.num_threads,
            is_small_model=device.is_small_model,
            quantization=config.quantization,
            kv_cache_dtype=config.kv_cache_dtype,
            num_parameters=self._model.num_parameters,
            weight_bytes=sum({weight.data_ptr(): weight.nbytes for weight in held}.values()),
            **vars(loaded),
        )

    def cache_report(self) -> CacheReport:
        """Measure what is free now that the weights are loaded, and what a step takes of it."""
        config, device = self._config, self.device
        if device.group is not None:
            device.group.agree(None)  # all have loaded, and share what is left
        # A mapped file counts as memory that could be freed; steps read all of it.
        mapped = self._store.mapped_bytes + (self._drafter.store.mapped_bytes if self._drafter is not None else 0)
        max_rows = min(config.max_num_seqs * (1 + config.max_num_drafts), config.max_num_batched_tokens)
        groups, itemsize = self._groups, device.backend.kv_cache_dtype(self._model.dtype).itemsize
        shapes = [device.cache_shape(layer, 1, config.block_size) for layer in self._layers]
        layer_bytes = [itemsize * math.prod(shape) for shape in shapes]
        block_bytes = [sum(layer_bytes[layer] for layer in group.layers) for group in groups]
        meter = device.meter(self._runnable, self._layers, len(groups))
        try:
            activation_bytes = meter.activation_bytes(config.max_num_batched_tokens, max_rows)
        except torch.OutOfMemoryError as error:
            raise ConfigError("no room for the largest step: lower max_num_batched_tokens or max_num_seqs.") from error
        return CacheReport(
            total_bytes=device.total_bytes(),
            other_bytes=device.other_bytes,
            available_bytes=max(0, device.available_bytes() - mapped * config.num_sharers) // config.num_sharers,
            activation_bytes=activation_bytes,
            groups=groups,
            block_bytes=block_bytes,
            stored=self._open_files(block_bytes),
            copy_bytes_per_second=device.copy_bytes_per_second() if config.swaps else 0.0,
        )

    def _open_files(self, block_bytes: list[int]) -> list[list[bytes]] | None:
        """Begin to keep blocks on the disk, if that is asked for; returns the names of those that are there."""
        config = self._config
        if config.kv_cache_dir is None:
            return None
        fingerprint = kv_fingerprint(config, self.device.kernels, self._layers)
        limit = int(config.kv_cache_dir_size * 2**30)
        self._files = BlockFiles(BlockFolder(Path(config.kv_cache_dir).expanduser(), fingerprint, limit, block_bytes))
        return self._files.start()

    def reload_weights(self) -> None:
        """What vLLM's scripts ask for after `wake_up(["weights"])`, which has loaded them here: nothing is left to do.

        Raises:
            ConfigError: there is a KV cache, which other weights have not filled.
        """
        if self._runner is not None:
            raise ConfigError("the KV cache is of the weights that there are; use update_weights(FOLDER) for others.")

    def initialize_cache(self, layout: CacheLayout) -> None:
        """Allocate the KV cache; its pages cost memory once they are first written, or touched ahead of that."""
        config, device, self.place.layout = self._config, self.device, layout
        dtype = device.backend.kv_cache_dtype(self._model.dtype)
        caches: dict[int, torch.Tensor] = {}
        for group, num_blocks in zip(self._groups, layout.num_blocks, strict=True):
            touched = min(num_blocks, TOUCHED_TOKENS // layout.block_size)  # the pool hands out its first ones first
            for layer in group.layers:
                shape = device.cache_shape(self._layers[layer], num_blocks, layout.block_size)
                caches[layer] = device.allocate(shape, dtype, touched)
        # Forks are made before rows are removed: for that moment there can be twice as many.
        table = RowTable(2 * config.max_num_seqs, layout, config.max_num_drafts, config.draft_tree)
        tensors = [caches[layer] for layer in range(len(self._layers))]
        host = HostCache(device, tensors, self._groups, layout.num_host_blocks) if layout.num_host_blocks else None
        if host is not None and self._files is not None:
            self._disk = DiskCache(host, self._files)
        cache = KVCache(device.backend, tensors, self._groups, host, self._model.dtype)
        self._runner = self._make_runner(cache, table)
        device.reserve(self._runnable, config.max_num_batched_tokens)  # not before all is measured
        for store in [self._store, *([] if self._drafter is None else [self._drafter.store])]:
            store.use_huge_pages(device.available_bytes)

    def _make_runner(self, cache: KVCache, table: RowTable) -> ModelRunner:
        config, model, speculative, drafter = self._config, self._runnable, self._config.speculative, self._drafter
        proposer: Proposer | None = None
        if drafter is not None:
            proposer = drafter.proposer(model, table, cache.tensors[len(self._model.cache_layers) :])
        elif speculative is not None and config.stage.is_last:
            proposer = PROPOSERS[speculative.method](speculative)
        runner = ModelRunner(self.device, model, cache, table, config.debug, self._model.classifies)
        runner.adapters = self._adapters
        if proposer is None and self.device.draws:  # what drafts reads tokens from the rows
            runner.ahead = Ahead(self.device, model, table, self.device.make_sampler(model.vocab_size))
        if config.num_stages > 1:
            self.place.links = self.place.links or (open_link(config, True), open_link(config, False))
            runner.before, runner.after = self.place.links
        if speculative is None or proposer is None:
            return runner
        proposer.max_batch = speculative.disable_by_batch_size or math.inf
        # The rejection sampler takes a draft that is certain just when the sampler's own draw is it.
        judges = {"exact": False, "rejection": proposer.from_prefix, "typical": True}[speculative.acceptance]
        runner.speculation = drafts = Speculation(self.device, proposer)
        if judges:
            drafts.judge = Judge(self.device.target, proposer, Rule(speculative.threshold, speculative.alpha))
        if speculative.adaptive and speculative.acceptance != "typical":
            sizes = [size for size in PACE_SIZES if size <= max(2, config.max_num_batched_tokens)]
            meter = self.device.meter(model, self._layers, len(self._groups))
            costs = StepCosts(meter.step_seconds(sizes, PACE_SECONDS), HOST_SECONDS)
            drafting, reads = PROPOSER_SECONDS, False
            if drafter is not None:
                meter = drafter.device.meter(drafter.timed, drafter.layers, len(self._groups))
                drafting, reads = meter.step_seconds(drafter.timed_sizes, PACE_SECONDS), drafter.reads
            drafts.pace = Pace(costs, StepCosts(drafting), reads, config.draft_tree, proposer.reads_all)
        return runner

    def begin(self, plan: StepPlan) -> None:
        """Compute a step's tokens; where one is begun that is still to be sampled, `take` will."""
        if self.runner.begun is not None:
            self._later.append(plan)
            return
        if self._disk is not None:
            self._disk.begin(plan)
        with self.device.computing():
            self.runner.begin(plan)

    def finish(self, guide: SampleGuide | None = None) -> StepResult:
        """Sample the step that was begun, unless a later stage does."""
        if not self._config.stage.is_last:
            return _NO_RESULT
        with self.device.computing():
            result = self.runner.finish(guide)
            if self._later and self.runner.ahead is not None:  # the device goes on while the result is read
                self.runner.begin(self._later.popleft())
        if self._disk is not None and (news := self._disk.finish()) is not None:
            result = structs.replace(result, disk=news)
        return result

    def take(self, result: StepResult) -> None:
        """Hear what the last stage has sampled of the oldest plan; there, begin the next."""
        if not self._config.stage.is_last:
            self.runner.take(result)
        elif self._later:
            self.begin(self._later.popleft())

    def reset(self) -> None:
        """Forget all sequences; what is in the KV cache stays."""
        self.runner.reset(self._later)
        self._later.clear()
        if self._disk is not None:
            self._disk.reset()

    def close(self) -> None:
        """Write to the disk what waits for it, and load no more adapters; safe to call twice."""
        if self._disk is not None:
            self._disk.close()
        if self._adapters is not None:
            self._adapters.close()

    @property
    def max_in_flight(self) -> int:
        """Plans that may be begun before the oldest is finished."""
        config = self._config
        return 2 if self.device.draws and config.speculative is None and config.kv_cache_dir is None else 1

    @property
    def runner(self) -> ModelRunner:
        """What carries out the steps; there from `initialize_cache` on."""
        assert self._runner is not None, "initialize_cache comes first"
        return self._runner

    @property
    def model(self) -> torch.nn.Module:
        """The model itself, for `LLM.apply_model`."""
        self._store.settle()
        return self._model

    def call(self, call: CheckIntegrity | PlaceAdapters) -> WorkerReply:
        """Answer a call: place adapters, or say whether the rows are consistent, and those of the live sequences."""
        if isinstance(call, PlaceAdapters):
            assert self._adapters is not None, "the model has no places for adapters"
            with torch.no_grad():
                return self._adapters.place(call)
        try:
            if self._runner is not None:
                self._runner.table.check_integrity(call.live_sequence_ids)
        except AssertionError as error:
            return CallReply(str(error))
        return CallReply(None)
