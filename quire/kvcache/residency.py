"""How long cached contents stay in their blocks, how long they lie unused, and how soon they are used again.

A block pool tells of the blocks that it samples; one `ResidencyTimes` counts for all pools of a KV manager, which sets
its time once a step, so that nothing here reads a clock. Counts travel in `EngineStats`, and /metrics shows them in
histograms of the same kinds. It must not know hashes, sequences or Prometheus.
"""

from quire.metrics.histogram import Histogram
from quire.protocol.stats import Counts

UNSAMPLED = 15  # blocks whose number has one of these bits are not looked at: one in 16 is
_SECONDS = [
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
]


def residency_histograms() -> list[Histogram]:
    """Empty histograms, under vLLM's names and with its bounds: lifetime, idle before eviction, gap between uses."""
    names = {
        "lifetime": "From a cached block's being findable to its eviction; one block in 16 is looked at.",
        "idle_before_evict": "From a cached block's last use to its eviction; one block in 16.",
        "reuse_gap": "From a use of a cached block to the next; one block in 16.",
    }
    return [Histogram(f"vllm:kv_block_{name}_seconds", help, _SECONDS) for name, help in names.items()]


class ResidencyTimes:
    """Times of the sampled blocks' contents, in seconds.

    Attributes:
        now: seconds of any monotonic clock, to be set by whoever has one.
        lifetime: from a block's being findable to its eviction.
        idle: from its last use to its eviction.
        reuse_gap: between a use and the next one.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.lifetime, self.idle, self.reuse_gap = self.histograms = residency_histograms()

    def counts(self) -> list[Counts]:
        """What the histograms have counted; [] as long as that is nothing."""
        if not any(histogram.total for histogram in self.histograms):
            return []
        return [Counts(list(histogram.counts), histogram.total) for histogram in self.histograms]


class Residency:
    """When the sampled blocks of one pool got their contents, and when those were last used."""

    def __init__(self, times: ResidencyTimes) -> None:
        self._times = times
        self._stored: dict[int, float] = {}
        self._used: dict[int, float] = {}

    def on_stored(self, block: int) -> None:
        """A block's content can be found from now on."""
        self._stored[block] = self._used[block] = self._times.now

    def on_used(self, block: int) -> None:
        """A block has got another owner."""
        if block in self._used:
            now = self._times.now
            self._times.reuse_gap.observe(now - self._used[block])
            self._used[block] = now

    def on_left(self, block: int) -> None:
        """A block has no owner any more."""
        if block in self._used:
            self._used[block] = self._times.now

    def on_evicted(self, block: int) -> None:
        """A block's content is gone."""
        now = self._times.now
        self._times.idle.observe(now - self._used.pop(block))
        self._times.lifetime.observe(now - self._stored.pop(block))

    def forget_all(self) -> None:
        """No block's content can be found any more."""
        self._stored.clear()
        self._used.clear()
