"""A snapshot of the engine's counters and gauges, under vLLM's metric names.

`LLM.get_metrics` and the benchmarks read it; the server's /metrics will export the same. It reads what the scheduler
counts and measures nothing itself.
"""

from dataclasses import dataclass
from typing import Protocol


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


@dataclass(frozen=True)
class EngineStats:
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
