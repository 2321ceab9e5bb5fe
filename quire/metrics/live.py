"""What the live view shows beyond the engine's own snapshot: the last five minutes, second by second.

The recorder advances the history as tokens come, which costs a comparison a step and a few microseconds a second; the
page's event stream reads it. It starts no task and knows no web.
"""

from collections import deque

import msgspec

from quire.metrics.histogram import Histogram, quantile
from quire.protocol.stats import EngineStats

NUM_SECONDS = 300


class Second(msgspec.Struct, frozen=True, array_like=True):
    """What happened within one second."""

    second: int  # of the monotonic clock
    num_prompt_tokens: int  # of prompts whose first token came
    num_generation_tokens: int
    itl_p50: float | None  # inter-token latency in seconds; None where there was none
    itl_p99: float | None
    num_running: int  # at the end of the second, as the three below
    num_waiting: int
    kv_cache_usage: float  # 0 to 1
    hit_rate: float | None  # of the prompt tokens looked up in the prefix cache within the second


class History:
    """The last seconds, oldest first. Counters are read when a second ends: what they gained is that second's."""

    def __init__(self, inter_token_latency: Histogram) -> None:
        self.seconds: deque[Second] = deque(maxlen=NUM_SECONDS)
        self.ends_at = 0.0  # of the second that runs: nothing needs to be told before
        self._latency = inter_token_latency
        self._counts = list(inter_token_latency.counts)
        self._tokens = (0, 0)
        self._lookups = (0, 0)

    def advance(self, now: float, tokens: tuple[int, int], stats: EngineStats | None) -> None:
        """End the seconds before `now`; `tokens` are the prompt and generation tokens since the start."""
        if now < self.ends_at:
            return
        ended, self.ends_at = int(self.ends_at) - 1, int(now) + 1.0
        if ended < 0:
            return  # the first second has only begun
        last = self._end(ended, tokens, stats)
        self.seconds.append(last)
        quiet = msgspec.structs.replace(
            last, num_prompt_tokens=0, num_generation_tokens=0, itl_p50=None, itl_p99=None, hit_rate=None
        )
        for second in range(max(ended + 1, int(now) - NUM_SECONDS), int(now)):
            self.seconds.append(msgspec.structs.replace(quiet, second=second))

    def _end(self, second: int, tokens: tuple[int, int], stats: EngineStats | None) -> Second:
        counts = self._latency.counts
        gained = [after - before for after, before in zip(counts, self._counts, strict=True)]
        lookups = (stats.prefix_cache_queries_total, stats.prefix_cache_hits_total) if stats else self._lookups
        queries, hits = lookups[0] - self._lookups[0], lookups[1] - self._lookups[1]
        result = Second(
            second=second,
            num_prompt_tokens=tokens[0] - self._tokens[0],
            num_generation_tokens=tokens[1] - self._tokens[1],
            itl_p50=quantile(self._latency.bounds, gained, 0.5),
            itl_p99=quantile(self._latency.bounds, gained, 0.99),
            num_running=stats.num_requests_running if stats else 0,
            num_waiting=stats.num_requests_waiting if stats else 0,
            kv_cache_usage=stats.kv_cache_usage_perc if stats else 0.0,
            hit_rate=hits / queries if queries > 0 else None,
        )
        self._counts, self._tokens, self._lookups = list(counts), tokens, lookups
        return result
