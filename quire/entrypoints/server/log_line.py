"""The line that says every few seconds how fast a busy server is. `quire serve` logs it; nothing is measured here."""

from quire.entrypoints.server.metrics import ServingMetrics
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


class ThroughputLine:
    """The line of one server; `now`, in seconds of the monotonic clock, is when the first one begins."""

    def __init__(self, metrics: ServingMetrics, now: float) -> None:
        self._metrics = metrics
        self._time, self._was_busy = now, False  # at the last line
        self._counts = [0] * 4

    def next(self, stats: EngineStats, time: float) -> str | None:
        """What the server did since the last call; None when it was idle and the last line had said so."""
        counts = [self._metrics.num_prompt_tokens, self._metrics.num_generation_tokens]
        counts += [stats.prefix_cache_queries_total, stats.prefix_cache_hits_total]
        num_prompt, num_generation, queries, hits = (now - last for now, last in zip(counts, self._counts, strict=True))
        seconds, was_busy = max(time - self._time, 1e-3), self._was_busy
        self._time, self._counts = time, counts
        self._was_busy = stats.num_requests_running + stats.num_requests_waiting > 0
        if not (num_prompt or num_generation or self._was_busy or was_busy):
            return None
        parts = [
            f"prompt {num_prompt / seconds:.1f} tokens/s, generation {num_generation / seconds:.1f} tokens/s",
            f"running {stats.num_requests_running}, waiting {stats.num_requests_waiting}{_reasons(stats)}",
            f"KV cache {stats.kv_cache_usage_perc:.1%} used",
        ]
        if queries > 0:
            parts.append(f"prefix cache hits {hits / queries:.1%}")
        return "; ".join(parts)


def _reasons(stats: EngineStats) -> str:
    reasons = [f"{count} {_WAITING_FOR.get(reason, reason)}" for reason, count in stats.waiting_reasons.items()]
    return f" ({', '.join(reasons)})" if reasons else ""
