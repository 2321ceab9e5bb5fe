"""How many KV blocks fit: from a measured memory report to a number, with the refusals that belong to it.

The engine calls `plan_kv_blocks` once at start-up, between loading the weights and building the scheduler. It knows
the options and the report's numbers and nothing of tensors. The worker calls `keep_freed_memory` before it computes,
and takes what is large and read in streams from `huge_pages`.
"""

import contextlib
import ctypes
import math
import mmap
from dataclasses import dataclass

import torch

from quire.config.engine_args import EngineConfig
from quire.errors import ConfigError

CPU_SHARE = 0.4  # of the memory that is free after loading: a CPU's memory serves the rest of the machine too
MIB = 1 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_REUSED_BYTES = 32 * MIB  # the largest threshold that every glibc takes
_KEPT_BYTES = 1024 * MIB
_HUGE_PAGE = 2 * MIB


def keep_freed_memory() -> bool:
    """Let malloc reuse what a step's tensors leave behind; returns whether this C library can (glibc).

    By default glibc maps every large tensor anew and returns it to the system when it is freed, so that each step pays
    for the first touch of its pages again: 2.4 ms for each MiB on the reference machine.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _REUSED_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))


def huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A zeroed tensor in huge pages, where the system has any: streams through it run faster. Untouched until used."""
    num_bytes = dtype.itemsize * math.prod(shape)
    if num_bytes < _HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype)
    region = mmap.mmap(-1, num_bytes + _HUGE_PAGE)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        region.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + num_bytes].view(dtype).view(shape)


@dataclass(frozen=True)
class MemoryReport:
    """What a worker measured once its weights were loaded, in bytes."""

    available_bytes: int  # free for the KV cache and activations together
    activation_bytes: int  # upper estimate of a step's transient tensors
    block_bytes: int  # one KV block, keys and values of all layers


@dataclass(frozen=True)
class KVPlan:
    """The size of the KV cache, and the longest context that fits in it."""

    num_blocks: int
    max_model_len: int  # tokens


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
