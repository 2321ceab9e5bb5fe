"""What the live view shows beyond the engine's own snapshot: the last five minutes, second by second.

The recorder advances the history as tokens come, which costs a comparison a step and a few microseconds a second; the
page's event stream reads it. It starts no task and knows no web.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from quire.metrics.histogram import Histogram
from quire.protocol.stats import EngineStats

NUM_SECONDS = 300


class Second(msgspec.Struct, frozen=True, array_like=True):
    """What happened within one second."""

    second: int  # of the monotonic clock
    num_prompt_tokens: int  # of prompts whose first token came
    num_generation_tokens: int
    num_errors: int  # sequences that ended with an error of the engine's
    num_preemptions: int
    num_running: int  # at the most, as the next
    num_waiting: int
    kv_cache_usage: float  # 0 to 1, at the end of the second
    hit_rate: float | None  # of the prompt tokens looked up in the prefix cache within the second
    latencies: Sequence[float | None]  # each histogram's p50 and p99 in seconds; None where nothing was counted


class History:
    """The last seconds, oldest first. Counters are read when a second ends: what they gained is that second's."""

    def __init__(self, histograms: Sequence[Histogram]) -> None:
        self.seconds: deque[Second] = deque(maxlen=NUM_SECONDS)
        self._ends_at = 0.0  # of the second that runs: nothing needs to be told before
        self._histograms = histograms
        self._counts = [list(histogram.counts) for histogram in histograms]
        self._totals = [0] * 6  # those of `advance`, and three of the engine's
        self._stats = EngineStats()
        self._most = (0, 0)  # running and waiting at once, within the second

    def see(self, stats: EngineStats) -> None:
        """The engine's newest figures."""
        self._stats, (running, waiting) = stats, self._most
        self._most = max(running, stats.num_requests_running), max(waiting, stats.num_requests_waiting)

    def advance(self, now: float, totals: Iterable[int]) -> None:
        """End the seconds before `now`; `totals` are prompt tokens, generation tokens and errors since the start."""
        if now < self._ends_at:
            return
        ended, self._ends_at = int(self._ends_at) - 1, int(now) + 1.0
        if ended < 0:
            return  # the first second has only begun
        self.seconds.append(self._end(ended, totals))
        quiet = [0, 0, 0, 0, *self._most, self._stats.kv_cache_usage_perc, None, [None] * 2 * len(self._histograms)]
        for second in range(max(ended + 1, int(now) - NUM_SECONDS), int(now)):
            self.seconds.append(Second(second, *quiet))

    def _end(self, second: int, totals: Iterable[int]) -> Second:
        stats, latencies, before = self._stats, list[float | None](), self._totals
        self._totals = [*totals, stats.num_preemptions_total, stats.prefix_cache_queries_total]
        self._totals.append(stats.prefix_cache_hits_total)
        *gained, queries, hits = [max(0, now - then) for now, then in zip(self._totals, before, strict=True)]
        for histogram, then in zip(self._histograms, self._counts, strict=True):
            counts = [now - before for now, before in zip(histogram.counts, then, strict=True)]
            latencies += [quantile(histogram.bounds, counts, share) for share in (0.5, 0.99)]
            then[:] = histogram.counts
        values = [*gained, *self._most, stats.kv_cache_usage_perc, hits / queries if queries else None, latencies]
        self._most = stats.num_requests_running, stats.num_requests_waiting
        return Second(second, *values)


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which `share` (0 to 1) of the counted values lie, even within its bucket; None without values."""
    num_values = sum(counts)
    if not num_values:
        return None
    rank, below = share * num_values, 0
    for index, count in enumerate(counts):
        if count and below + count >= rank:
            low = bounds[index - 1] if index else 0.0
            high = bounds[min(index, len(bounds) - 1)]  # nothing is known beyond the last bound
            return low + (high - low) * (rank - below) / count
        below += count
    return bounds[-1]
