"""What happens to cached KV blocks, in vLLM's messages: routers follow them to know which prefixes an engine holds.

The KV manager writes them down, the engine publishes a batch a step. Blocks are called by the names that
`quire.kvcache.prefix` makes. All are arrays on the wire, events with their type's name first.
"""

from typing import Protocol

import msgspec

DEVICE = "GPU"  # vLLM's word for the memory that attention reads, whatever it is made of


class BlockStored(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    """Blocks, one after another in a prefix, can be found from now on."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None  # of the block before the first; None at the beginning
    token_ids: list[int]  # of all of them
    block_size: int
    lora_id: int | None = None
    medium: str | None = DEVICE
    lora_name: str | None = None
    extra_keys: None = None
    group_idx: int | None = None  # KV group, where there are several


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    """Blocks were evicted."""

    block_hashes: list[bytes]
    medium: str | None = DEVICE
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    """Everything was forgotten."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What happened since the last batch, in order."""

    ts: float  # seconds since 1970
    events: list[KVEvent]
    data_parallel_rank: int | None = None


class KVEventSink(Protocol):
    """Whoever publishes events."""

    def publish(self, events: list[KVEvent]) -> None:
        """Send what happened in a step, without waiting."""

    def close(self) -> None:
        """Send what waits, and end."""
