"""The KV cache between rooms: what a worker measured, and what the engine decided.

The worker reports, `quire.kvcache.capacity` plans, the KV manager and the worker follow the plan. Numbers only.
"""

from dataclasses import dataclass


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
