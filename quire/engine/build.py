"""From a resolved configuration to a running engine core: model loaded, memory measured, scheduler and executor joined.

`LLMEngine` calls it, and the engine's own process or thread. It decides nothing but the number of KV blocks.
"""

import logging
import time

from quire.config.cache import CacheConfig
from quire.config.engine_args import EngineConfig
from quire.engine.core import EngineCore
from quire.executor.inprocess import InProcessExecutor
from quire.kvcache.manager import KVManager
from quire.models.registry import check_architecture
from quire.scheduler.scheduler import Scheduler
from quire.worker.memory import plan_kv_blocks

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
    plan = plan_kv_blocks(config, executor.memory_report())
    if plan.max_model_len < config.model.max_model_len:
        logger.warning(
            "max_model_len lowered from %d to %d tokens: that is what the KV cache holds",
            config.model.max_model_len,
            plan.max_model_len,
        )
        config = config.with_max_model_len(plan.max_model_len)
    executor.initialize_cache(plan.num_blocks, plan.max_model_len)
    cache = CacheConfig(
        block_size=config.args.block_size,
        num_blocks=plan.num_blocks,
        enable_prefix_caching=config.args.enable_prefix_caching,
    )
    logger.info("%s; dtype %s", loaded, config.model.dtype)
    logger.info(
        "KV cache: %d blocks of %d tokens (%d tokens); context %d tokens; ready in %.2f s",
        plan.num_blocks,
        cache.block_size,
        plan.num_blocks * cache.block_size,
        plan.max_model_len,
        time.perf_counter() - start,
    )
    return EngineCore(config, Scheduler(config.scheduler, KVManager(cache)), executor)
