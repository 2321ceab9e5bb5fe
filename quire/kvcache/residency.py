"""How long cached contents stay in their blocks, how long they lie unused, and how soon they are used again.

A block pool tells of the blocks that it samples; one `ResidencyTimes` counts for all pools of a KV manager, which sets
its time once a step, so that nothing here reads a clock. It must not know hashes, sequences or Prometheus.
"""

from quire.metrics.histogram import Histogram
from quire.metrics.residency import residency_histograms
from quire.protocol.stats import Counts

UNSAMPLED = 15  # blocks whose number has one of these bits are not looked at: one in 16 is


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
        self._observe_use(block, self._times.reuse_gap)

    def on_left(self, block: int) -> None:
        """A block has no owner any more."""
        if block in self._used:
            self._used[block] = self._times.now

    def on_evicted(self, block: int) -> None:
        """A block's content is gone."""
        self._observe_use(block, self._times.idle)
        del self._used[block]
        self._times.lifetime.observe(self._times.now - self._stored.pop(block))

    def forget_all(self) -> None:
        """No block's content can be found any more."""
        self._stored.clear()
        self._used.clear()

    def _observe_use(self, block: int, histogram: Histogram) -> None:
        if block in self._used:
            now = self._times.now
            histogram.observe(now - self._used[block])
            self._used[block] = now
