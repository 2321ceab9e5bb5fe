"""The KV cache between rooms: what a model's layers keep, what a worker measured, what the engine decided.

The worker reports, `quire.kvcache.capacity` plans, the KV manager and the worker follow the plan. Numbers only.
"""

from collections.abc import Iterable

import msgspec


class LayerCache(msgspec.Struct, frozen=True, array_like=True):
    """What one attention layer keeps of each token."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None  # tokens that a query sees, itself included; None: all before it


class CacheGroup(msgspec.Struct, frozen=True, array_like=True):
    """Layers whose blocks are taken and freed together: one block table a sequence, one pool of blocks."""

    layers: list[int]  # indices of the model's cache layers
    window: int | None = None  # as LayerCache.window; what has fallen out of it is freed


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker measured once its weights were loaded, in bytes."""

    available_bytes: int  # free for the KV cache and activations together
    total_bytes: int = 0  # the device's memory, where a share is of all of it; 0 where it is of what is available
    other_bytes: int = 0  # of these, what others had taken before the worker came: no part of its share
    activation_bytes: int  # of a step's transient tensors, measured by a real execute
    groups: list[CacheGroup]
    block_bytes: list[int]  # by group: one block, keys and values of the group's layers
    copy_bytes_per_second: float = 0.0  # between device and host blocks; 0.0: not measured
    stored: list[list[bytes]] | None = None  # by group, the names of blocks on the disk; None: there is no such tier


class CacheLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache as it was decided; the same for scheduler and workers."""

    block_size: int  # tokens in a block
    groups: list[CacheGroup]
    num_blocks: list[int]  # by group
    max_model_len: int  # tokens of the longest sequence
    num_host_blocks: list[int] = []  # by group, for what is swapped out; [] for no host memory
    block_bytes: list[int] = []  # by group, of one block; [] where nobody needs to know
    copy_bytes_per_second: float = 0.0  # as the worker measured it; 0.0: unknown


class PinnedPrefix(msgspec.Struct, frozen=True, tag=True):
    """The beginning of a prompt whose blocks stay in the KV cache until it is unpinned."""

    name: str
    num_tokens: int  # whole blocks of the prompt
    num_blocks: int  # of all KV groups; other pins may have some of them, too


def group_layers(layers: list[LayerCache], windows_of_all: Iterable[int | None] = ()) -> list[CacheGroup]:
    """Cache groups of a model's layers: full attention first, then each window, by first appearance.

    `windows_of_all`: those of all stages' layers, so that each stage has all groups, of some perhaps no layer.
    """
    windows = sorted(dict.fromkeys([*windows_of_all, *(each.window for each in layers)]), key=lambda w: w is not None)
    return [CacheGroup([i for i, layer in enumerate(layers) if layer.window == w], w) for w in windows]


def least(reports: list[CacheReport]) -> CacheReport:
    """What all workers have at least, where each keeps its own part of every block: the largest one is counted."""
    available = reports[0].activation_bytes + min(each.available_bytes - each.activation_bytes for each in reports)
    largest = [max(sizes) for sizes in zip(*(report.block_bytes for report in reports), strict=True)]
    return msgspec.structs.replace(reports[0], available_bytes=available, block_bytes=largest)
