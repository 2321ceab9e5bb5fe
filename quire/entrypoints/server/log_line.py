"""The line that says every few seconds how fast a busy server is. `quire serve` logs it; nothing is measured here."""

from typing import NamedTuple

from quire.metrics.serving import ServingMetrics
from quire.protocol.stats import EngineStats

# The scheduler's reasons, in words that follow a number of requests.
_WAITING_FOR = {
    "capacity": "for a free place in the batch",
    "budget": "for tokens of a step",
    "blocks": "for KV blocks",
    "prefix": "for a shared prefix",
    "order": "for those before",
    "next_step": "for the next step",
}


class Logged(NamedTuple):
    """The counters at a log line."""

    time: float
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    busy: bool = False  # whether requests ran or waited then


class ThroughputLine:
    """The line of one server; `now`, in seconds of the monotonic clock, is when the first one begins."""

    def __init__(self, metrics: ServingMetrics, now: float) -> None:
        self._metrics = metrics
        self._last = Logged(now)

    def next(self, stats: EngineStats, time: float) -> str | None:
        """What the server did since the last call; None when it was idle and the last line had said so."""
        now = Logged(
            time=time,
            num_prompt_tokens=self._metrics.num_prompt_tokens,
            num_generation_tokens=self._metrics.num_generation_tokens,
            prefix_cache_queries=stats.prefix_cache_queries_total,
            prefix_cache_hits=stats.prefix_cache_hits_total,
            busy=stats.num_requests_running + stats.num_requests_waiting > 0,
        )
        last, self._last = self._last, now
        num_prompt = now.num_prompt_tokens - last.num_prompt_tokens
        num_generation = now.num_generation_tokens - last.num_generation_tokens
        if not (num_prompt or num_generation or now.busy or last.busy):
            return None
        seconds = max(now.time - last.time, 1e-3)
        parts = [
            f"prompt {num_prompt / seconds:.1f} tokens/s, generation {num_generation / seconds:.1f} tokens/s",
            f"running {stats.num_requests_running}, waiting {stats.num_requests_waiting}{_reasons(stats)}",
            f"KV cache {stats.kv_cache_usage_perc:.1%} used",
        ]
        queries = now.prefix_cache_queries - last.prefix_cache_queries
        if queries > 0:
            parts.append(f"prefix cache hits {(now.prefix_cache_hits - last.prefix_cache_hits) / queries:.1%}")
        return "; ".join(parts)


def _reasons(stats: EngineStats) -> str:
    reasons = [f"{count} {_WAITING_FOR.get(reason, reason)}" for reason, count in stats.waiting_reasons.items()]
    return f" ({', '.join(reasons)})" if reasons else ""
