"""Snapshots of the engine: its counters and gauges under vLLM's metric names, and each sequence and block on its own.

`LLM.get_metrics` and the server's /metrics read the one, the server's live view the other. They come from what the
scheduler counts; nothing is measured here.
"""

from typing import Protocol

import msgspec


class _Counted(Protocol):
    """What a scheduler offers to be counted."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def kv_cache_usage(self) -> float: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def prefix_cache_queries(self) -> int: ...
    @property
    def prefix_cache_hits(self) -> int: ...
    def waiting_reasons(self) -> dict[str, int]: ...


class EngineStats(msgspec.Struct, frozen=True):
    """Gauges at a moment, and counters since the start."""

    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage_perc: float  # 0 to 1, as the metric of that name is
    num_preemptions_total: int
    prefix_cache_queries_total: int  # prompt tokens looked up
    prefix_cache_hits_total: int  # prompt tokens found
    waiting_reasons: dict[str, int]  # why the waiting wait -> how many

    @classmethod
    def of(cls, scheduler: _Counted) -> "EngineStats":
        """The figures of a scheduler, now."""
        return cls(
            num_requests_running=scheduler.num_running,
            num_requests_waiting=scheduler.num_waiting,
            kv_cache_usage_perc=scheduler.kv_cache_usage,
            num_preemptions_total=scheduler.num_preemptions,
            prefix_cache_queries_total=scheduler.prefix_cache_queries,
            prefix_cache_hits_total=scheduler.prefix_cache_hits,
            waiting_reasons=scheduler.waiting_reasons(),
        )


class SequenceSnapshot(msgspec.Struct):
    """One live sequence, for a person to look at."""

    request_id: str
    index: int  # among the request's sequences
    status: str  # "running" (holds blocks) or "waiting"
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int  # of the prompt, taken from the prefix cache
    num_blocks: int
    why: str | None  # why it waits, with numbers
    seconds: float  # since its arrival


class EngineSnapshot(msgspec.Struct, frozen=True):
    """The engine at a moment."""

    stats: EngineStats
    sequences: list[SequenceSnapshot]  # the running ones first, each in the policy's order; the first few hundred
    num_sequences: int  # all of them
    blocks: bytes  # one per KV block: 0 free, 1 unused but cached, 2 used
    block_size: int  # tokens of a block
