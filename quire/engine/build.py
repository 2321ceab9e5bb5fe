"""From a resolved configuration to a running engine core: model loaded, memory measured, scheduler and executor joined.

`LLMEngine` calls it, and the engine's own process or thread. It decides nothing itself: the size of the KV cache is
`kvcache.capacity`'s to plan. What the workers report as facts becomes lines of the log here.
"""

import time
from contextlib import ExitStack
from dataclasses import fields
from typing import Any, TypeVar

from quire.config.engine_args import EngineConfig
from quire.config.families import built_family
from quire.config.worker import WorkerConfig
from quire.engine.core import EngineCore
from quire.errors import ConfigError
from quire.executor.base import Executor
from quire.executor.select import select_executor
from quire.kvcache.capacity import CacheRequest, num_bytes, plan_cache
from quire.kvcache.manager import KVManager
from quire.protocol.cache import CacheLayout
from quire.protocol.worker import WorkerReport
from quire.scheduler.scheduler import Scheduler
from quire.structured.manager import GrammarManager
from quire.text.configured import config_tokenizer
from quire.text.grammars.compiler import Vocabulary
from quire.utils.logs import logger

T = TypeVar("T", WorkerConfig, CacheRequest)


def worker_config(config: EngineConfig) -> WorkerConfig:
    """What a worker has to know of an engine's options."""
    ranks = {"rank": 0, "num_ranks": config.args.num_ranks, "group": None, "nodes": ()}
    ranks["partition"] = config.args.partition(config.model.num_layers)
    most = config.args.num_adapter_places
    loras = {"max_loras": most, "max_cpu_loras": config.args.max_cpu_loras or 4 * most}
    loras["max_lora_rank"] = config.args.max_lora_rank * config.args.enable_lora
    return _options(WorkerConfig, config, swaps=config.swap_bytes > 0, **ranks, **loras)


def cache_request(config: EngineConfig, max_in_flight: int) -> CacheRequest:
    """What an engine's options ask of the KV cache."""
    asked = config.args.max_model_len is not None
    facts = {"is_max_model_len_asked": asked, "max_in_flight": max_in_flight, "swap_bytes": config.swap_bytes}
    return _options(CacheRequest, config, **facts)


def _options(kind: type[T], config: EngineConfig, **facts: Any) -> T:
    """The options that a room below has under the same names, as they were resolved, and further facts."""
    values = vars(config.args) | vars(config.scheduler) | vars(config) | facts
    return kind(**{field.name: values[field.name] for field in fields(kind)})


def build_core(
    config: EngineConfig, show_progress: bool, executor: Executor | None = None, rank: int = 0
) -> EngineCore:
    """Load the model and build the engine around it; its scheduler's `config` has the context that the KV cache holds.

    Args:
        config: the resolved options.
        show_progress: with a progress bar while weights are loaded.
        executor: not started yet; the one that suits the options where None.
        rank: the engine's, where there are several.

    Raises:
        ConfigError: the options don't suit the model or the memory.
        ModelLoadError: the model's files.
    """
    start = time.perf_counter()
    built_family(config.model.architecture, config.model.model)
    with ExitStack() as undo:
        publisher = None
        if config.kv_events.is_on:
            from quire.engine.kv_events import KVEventPublisher  # ZeroMQ comes in here: few engines need it

            # Before the model loads, which may take minutes: its addresses may be wrong, or taken.
            publisher = KVEventPublisher(config.kv_events, rank)
            undo.callback(publisher.close)
        if executor is None:
            executor = select_executor(worker_config(config), config.args)
        loaded = executor.start(progress=show_progress)
        undo.callback(executor.stop)
        layout, stored = _initialize_cache(config, executor)
        if (limit := layout.max_model_len) < (asked := config.model.max_model_len):
            logger.warning("max_model_len lowered from %d to %d tokens: that is what the KV cache holds", asked, limit)
            config = config.with_max_model_len(limit)
        logger.info("model: %s, %s; context %d tokens", config.model.model, config.model.dtype, limit)
        logger.info("%s", _describe(loaded))
        blocks, size = " + ".join(map(str, layout.num_blocks)), layout.block_size
        held = f"{blocks} blocks of {size} tokens, {max(layout.num_blocks, default=0) * size} tokens in all"
        logger.info("KV cache: %s; engine ready in %.2f s", held, time.perf_counter() - start)
        kv = KVManager(layout, config.args.enable_prefix_caching, publisher is not None, stored)
        scheduler = Scheduler(config.scheduler, kv, grammars=_grammars(config))
        undo.pop_all()
        return EngineCore(
            scheduler, executor, publisher=publisher, debug=config.args.debug, num_places=config.args.num_adapter_places
        )


def _grammars(config: EngineConfig) -> GrammarManager | None:
    """What compiles grammars, which reads the tokenizer when the first one is asked for."""
    if config.args.skip_tokenizer_init:
        return None

    def load() -> tuple[str, dict[str, int]]:
        tokenizer = config_tokenizer(config)
        assert tokenizer is not None, "an engine without a tokenizer has no grammars"
        return tokenizer.grammar_table()

    return GrammarManager(Vocabulary(load, config.model.vocab_size, tuple(config.model.eos_token_ids)))


def _initialize_cache(config: EngineConfig, executor: Executor) -> tuple[CacheLayout, list[list[bytes]] | None]:
    """The KV cache as decided, and the names of the blocks that the disk has for it."""
    request = cache_request(config, executor.max_in_flight)
    report = executor.cache_report()
    layout = plan_cache(request, report)
    try:
        executor.initialize_cache(layout)
    except (MemoryError, OSError, OverflowError) as error:
        raise ConfigError(
            f"there is no memory for a KV cache of {num_bytes(layout.num_blocks, report) / 2**30:.1f} GiB, "
            f"{max(layout.num_blocks)} blocks; lower num_kv_blocks, kv_cache_memory or max_num_seqs."
        ) from error
    return layout, report.stored


def _describe(loaded: WorkerReport) -> str:
    """What was loaded, the kernels in use and why, and the threads."""
    files = f"{loaded.num_files} {'file' if loaded.num_files == 1 else 'files'}"
    why = {
        "asked": "as asked for",
        "best": "the best that this machine has",
        "unserved": "no compiled ones serve this model here: slower",
    }[loaded.kernels_reason]
    small = ", as the model is small" if loaded.is_small_model else ""
    packed = "" if loaded.quantization is None else f"; {loaded.quantization} weights"
    cached = "" if loaded.kv_cache_dtype == "auto" else f"; {loaded.kv_cache_dtype} KV cache"
    return (
        f"weights: {loaded.num_bytes / 2**20:.1f} MiB in {files}, loaded in {loaded.seconds:.2f} s; "
        f"kernels: {loaded.kernels} ({why}); threads: {loaded.num_threads}{small}{packed}{cached}"
    )
