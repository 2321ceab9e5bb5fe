"""How many KV blocks fit: from a measured memory report to a number, with the refusals that belong to it.

The engine calls `plan_kv_blocks` once at start-up, between loading the weights and building the scheduler. It knows
the options and the report's numbers and nothing of tensors.
"""

from quire.config.engine_args import EngineConfig
from quire.errors import ConfigError
from quire.protocol.cache import KVPlan, MemoryReport

CPU_SHARE = 0.4  # of the memory that is free after loading: a CPU's memory serves the rest of the machine too
MIB = 1 << 20


def plan_kv_blocks(config: EngineConfig, report: MemoryReport) -> KVPlan:
    """Decide the number of KV blocks and, where the user left it open, a context length that fits them.

    Never more blocks than max_num_seqs contexts of max_model_len can use. When max_model_len was not given and the
    model's own limit does not fit, the context is shortened to what does.

    Raises:
        ConfigError: not even one block, or not one context of the max_model_len that was asked for, fits.
    """
    args, block_size = config.args, config.args.block_size
    max_model_len = config.model.max_model_len
    blocks_per_context = -(-max_model_len // block_size)
    if args.num_kv_blocks is not None:
        num_blocks = args.num_kv_blocks
    else:
        budget = _kv_budget(config, report)
        num_blocks = min(budget // report.block_bytes, blocks_per_context * config.scheduler.max_num_seqs)
        if num_blocks < 1:
            raise ConfigError(
                f"no memory for the KV cache: {budget // MIB} MiB are left for it and one block of {block_size} tokens "
                f"takes {report.block_bytes / MIB:.2f} MiB. Set kv_cache_memory, raise gpu_memory_utilization, or "
                f"lower max_num_batched_tokens (now {config.scheduler.max_num_batched_tokens})."
            )
    if num_blocks >= blocks_per_context:
        return KVPlan(num_blocks, max_model_len)
    fits = num_blocks * block_size
    if args.max_model_len is not None:
        needed = blocks_per_context * report.block_bytes
        raise ConfigError(
            f"max_model_len={max_model_len} needs {needed / MIB:.1f} MiB of KV cache ({blocks_per_context} blocks of "
            f"{block_size} tokens) but {num_blocks} blocks ({fits} tokens) fit. Lower max_model_len to at most {fits}, "
            "or give the KV cache more memory (kv_cache_memory, gpu_memory_utilization, num_kv_blocks)."
        )
    return KVPlan(num_blocks, fits)


def _kv_budget(config: EngineConfig, report: MemoryReport) -> int:
    if config.args.kv_cache_memory is not None:
        return config.args.kv_cache_memory
    share = config.args.gpu_memory_utilization or CPU_SHARE
    return int(report.available_bytes * share) - report.activation_bytes
