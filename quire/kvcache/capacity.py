"""How many KV blocks fit: from a measured memory report to a layout, with the refusals that belong to it.

The engine calls `plan_cache` once at start-up, between loading the weights and building the scheduler. It knows
numbers of the options and of the report, and nothing of tensors.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from quire.errors import ConfigError
from quire.kvcache.groups import window_reach
from quire.protocol.cache import CacheGroup, CacheLayout, CacheReport

CPU_SHARE = 0.4  # of the memory that is free after loading: a CPU's memory serves the rest of the machine too
GPU_SHARE = 0.92  # of all memory, weights included
_WINDOWS_SHARE = 4  # one byte in so many is for windows, if as many sequences can use it
MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class CacheRequest:
    """What the options ask of the KV cache.

    Attributes:
        block_size: tokens in a block.
        max_model_len: tokens of the longest sequence: the user's, or the model's own limit.
        is_max_model_len_asked: the user asked for it, so it is not shortened.
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens computed in a step.
        max_in_flight: plans that may be under way at once.
        num_kv_blocks: blocks of the largest group (full attention, or else the widest window), in place of a measure.
        kv_cache_memory: bytes of all blocks, in place of a measure.
        gpu_memory_utilization: share of the available memory, 0 to 1; None for the default.
        swap_bytes: host memory for swapped blocks.
        data_parallel_size: engines that share the available memory.
    """

    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    is_max_model_len_asked: bool = False
    max_in_flight: int = 1
    num_kv_blocks: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float | None = None
    swap_bytes: int = 0
    data_parallel_size: int = 1


def plan_cache(request: CacheRequest, report: CacheReport) -> CacheLayout:
    """Decide the number of KV blocks and, where the user left it open, a context length that fits them.

    All groups get blocks for the same number of contexts of max_model_len, so that they run out at about the same
    time. A context takes all its blocks in a group of full attention. In a windowed one it takes those that a window
    can show (window + 63 tokens, as keys are read in tiles of 64), and all contexts together those of the tokens that
    plans under way compute. But most sequences are shorter than the longest context, and their windows no less: beside
    full attention windowed groups get a quarter of all bytes, where that is more, unless the context that was asked for
    would not fit then. Never more than max_num_seqs contexts can use. When max_model_len was not asked for and the
    model's own limit does not fit, the context is shortened to what does.

    Raises:
        ConfigError: not even one block, or not one context of the max_model_len that was asked for, fits; or host
            memory was asked for that is not there.
    """
    sizes = _Sizes(request, report)
    needed = sizes.of_contexts(sizes.largest, Fraction(1))
    if request.num_kv_blocks is not None:
        num_blocks = request.num_kv_blocks
    else:
        budget = _budget(request, report)
        if (num_blocks := sizes.most_within(budget)) < needed and request.is_max_model_len_asked:
            sizes = _Sizes(request, report, share=None)
            num_blocks = sizes.most_within(budget)
        if num_blocks < 1:
            raise ConfigError(
                f"no memory for the KV cache: a block of {request.block_size} tokens takes "
                f"{sum(report.block_bytes) / MIB:.2f} MiB, and {max(budget, 0) / MIB:.2f} MiB are left beside a step's "
                f"{report.activation_bytes / MIB:.0f} MiB. Raise kv_cache_memory or gpu_memory_utilization, or lower "
                f"max_num_batched_tokens (now {request.max_num_batched_tokens}) or block_size."
            )
    max_model_len = request.max_model_len
    if num_blocks < needed:
        fits = num_blocks * request.block_size
        if request.is_max_model_len_asked:
            size = num_bytes(sizes.layout(needed), report)
            raise ConfigError(
                f"max_model_len={max_model_len} needs {size / MIB:.1f} MiB of KV cache ({needed} blocks of "
                f"{request.block_size} tokens) but {num_blocks} blocks ({fits} tokens) fit. Lower max_model_len to at "
                f"most {fits}, or give the KV cache more memory (kv_cache_memory, gpu_memory_utilization, "
                "num_kv_blocks)."
            )
        max_model_len = fits
    by_group = sizes.layout(num_blocks)
    return CacheLayout(
        block_size=request.block_size,
        groups=report.groups,
        num_blocks=by_group,
        max_model_len=max_model_len,
        num_host_blocks=_host_blocks(by_group, request, report) if request.swap_bytes else [],
        block_bytes=report.block_bytes,
        copy_bytes_per_second=report.copy_bytes_per_second,
    )


def _host_blocks(num_blocks: list[int], request: CacheRequest, report: CacheReport) -> list[int]:
    """The numbers of host blocks, divided among the groups as the device's are."""
    device_bytes = num_bytes(num_blocks, report)
    left = max(0, report.available_bytes - report.activation_bytes - device_bytes)
    if request.swap_bytes > left and not report.total_bytes:  # a GPU's is not the host's
        raise ConfigError(
            f"swap_space={request.swap_bytes / GIB:g} GiB is larger than the memory that is left beside model and KV "
            f"cache: {left / GIB:.1f} GiB. Lower swap_space, or the KV cache (num_kv_blocks, kv_cache_memory)."
        )
    num_host_blocks = [count * request.swap_bytes // device_bytes for count in num_blocks]
    if min(num_host_blocks) < 1:
        raise ConfigError(
            f"swap_space={request.swap_bytes / GIB:g} GiB holds no KV block of {max(report.block_bytes)} bytes; raise "
            "it, or set it to 0."
        )
    return num_host_blocks


class _Sizes:
    """What contexts of max_model_len take of each group, in blocks. `share`: `_WINDOWS_SHARE`, or None."""

    def __init__(self, request: CacheRequest, report: CacheReport, share: int | None = _WINDOWS_SHARE) -> None:
        self._groups, self._report, self._share = report.groups, report, share
        self._max_num_seqs = request.max_num_seqs
        # The group whose blocks are counted, the others following: full attention, or else the widest window.
        self.largest = max(report.groups, key=lambda group: (group.window is None, group.window or 0))
        self._block_size = request.block_size
        self._whole = -(-request.max_model_len // request.block_size)  # one context, all of it
        self._pending = -(-request.max_num_batched_tokens * request.max_in_flight // request.block_size)

    def of_contexts(self, group: CacheGroup, contexts: Fraction) -> int:
        """Blocks that so many contexts use, without which one might never get to its end; one context's at least in a
        windowed group."""
        whole = -(-contexts * self._whole // 1)
        if group.window is None:
            return int(whole)
        return min(int(whole), self._pending + int(-(-max(contexts, 1) * self._steady(group.window) // 1)))

    def layout(self, num_blocks: int) -> list[int]:
        """Blocks by group when the largest has `num_blocks`."""
        largest = self.largest
        contexts = Fraction(num_blocks, self._whole)

        def counts(contexts: Fraction) -> list[int]:
            return [num_blocks if group is largest else self.of_contexts(group, contexts) for group in self._groups]

        if largest.window is not None:
            contexts = max(contexts, Fraction(num_blocks - self._pending, self._steady(largest.window)))
        elif self._share is not None:
            most = num_blocks * self._report.block_bytes[self._groups.index(largest)] * self._share // (self._share - 1)
            sequences = range(1, self._max_num_seqs + 1)
            many = bisect_right(sequences, most, key=lambda count: num_bytes(counts(Fraction(count)), self._report))
            contexts = max(contexts, Fraction(many))
        return counts(contexts)

    def most_within(self, budget: int) -> int:
        """Blocks of the largest group with which all groups stay within so many bytes, and are of use."""
        few = range(1, self.of_contexts(self.largest, Fraction(self._max_num_seqs)) + 1)
        return bisect_right(few, budget, key=lambda count: num_bytes(self.layout(count), self._report))

    def _steady(self, window: int) -> int:
        """Blocks of a context that computes one token after the other."""
        return min(self._whole, -(-(window_reach(window, self._block_size) + 1) // self._block_size))


def num_bytes(num_blocks: Sequence[int], report: CacheReport) -> int:
    """Of so many blocks in each group."""
    return sum(count * size for count, size in zip(num_blocks, report.block_bytes, strict=True))


def _budget(request: CacheRequest, report: CacheReport) -> int:
    if request.kv_cache_memory is not None:
        return request.kv_cache_memory
    share = request.gpu_memory_utilization or (GPU_SHARE if report.total_bytes else CPU_SHARE)
    total = report.total_bytes or report.available_bytes  # of a CPU it is a share of what is free
    most = min(total * share / request.data_parallel_size + report.other_bytes, total * max(share, GPU_SHARE))
    return int(most) - (total - report.available_bytes) - report.activation_bytes
