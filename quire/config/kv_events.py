"""Options of the publisher of KV events: `kv_events_config`, a JSON object as vLLM's `--kv-events-config` takes it.

`EngineConfig` makes one of the option, `quire.engine.kv_events` follows it.
"""

import dataclasses
from typing import Literal

from quire.config.options import check_options, option


@dataclasses.dataclass(frozen=True)
class KVEventsConfig:
    """Whether, where and how KV events are published.

    Raises:
        ConfigError: an entry is unknown or out of its range.
    """

    enable_kv_cache_events: bool = option(False)
    """Publish what is stored in and removed from the prefix cache."""
    publisher: Literal["zmq", "null"] = option("zmq")
    """'zmq', or 'null' for nobody."""
    endpoint: str = option("tcp://*:5557")
    """Where subscribers connect: bound if it has a '*' or is ipc:// or inproc://."""
    replay_endpoint: str | None = option(None)
    """Where they ask for batches that they missed."""
    buffer_steps: int = option(10_000, 0)
    """Batches kept to be asked for."""
    hwm: int = option(100_000, 0, 2**31 - 1)
    """ZeroMQ's high-water mark: messages held for a slow subscriber."""
    max_queue_size: int = option(100_000, 1)
    """Batches that may wait to be sent; what is more is lost."""
    topic: str = option("")
    """What each message begins with, for subscribers to choose by."""

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def is_on(self) -> bool:
        """Whether there is anything to publish."""
        return self.enable_kv_cache_events and self.publisher == "zmq"
