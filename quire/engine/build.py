"""From a resolved configuration to a running engine core: model loaded, memory measured, scheduler and executor joined.

`LLMEngine` calls it, and the engine's own process or thread. It decides nothing but the number of KV blocks.
"""

import logging
import time

from quire.config.cache import CacheConfig
from quire.config.engine_args import EngineConfig
from quire.engine.core import EngineCore
from quire.errors import ConfigError
from quire.executor.inprocess import InProcessExecutor
from quire.kvcache.capacity import plan_kv_blocks
from quire.kvcache.manager import KVManager
from quire.models.registry import check_architecture
from quire.scheduler.scheduler import Scheduler

logger = logging.getLogger("quire")


def build_core(config: EngineConfig, show_progress: bool) -> EngineCore:
    """Load the model and build the engine around it; the core's own `config` has the context that the KV cache holds.

    Raises:
        ConfigError: the options don't suit the model or the memory.
        ModelLoadError: the model's files.
    """
    start = time.perf_counter()
    check_architecture(config.model)
    executor = InProcessExecutor(config)
    loaded = executor.start(progress=show_progress)
    report = executor.memory_report()
    plan = plan_kv_blocks(config, report)
    if plan.max_model_len < config.model.max_model_len:
        logger.warning(
            "max_model_len lowered from %d to %d tokens: that is what the KV cache holds",
            config.model.max_model_len,
            plan.max_model_len,
        )
        config = config.with_max_model_len(plan.max_model_len)
    try:
        executor.initialize_cache(plan.num_blocks, plan.max_model_len)
    except (MemoryError, OSError) as error:
        size = plan.num_blocks * report.block_bytes / 2**30
        raise ConfigError(
            f"there is no memory for a KV cache of {plan.num_blocks} blocks, {size:.1f} GiB; lower num_kv_blocks or "
            "kv_cache_memory."
        ) from error
    cache = CacheConfig(
        block_size=config.args.block_size,
        num_blocks=plan.num_blocks,
        enable_prefix_caching=config.args.enable_prefix_caching,
    )
    logger.info("model: %s, %s; context %d tokens", config.model.model, config.model.dtype, plan.max_model_len)
    logger.info("%s", loaded)
    logger.info(
        "KV cache: %d blocks of %d tokens, %d tokens in all; engine ready in %.2f s",
        plan.num_blocks,
        cache.block_size,
        plan.num_blocks * cache.block_size,
        time.perf_counter() - start,
    )
    return EngineCore(config, Scheduler(config.scheduler, KVManager(cache)), executor)
