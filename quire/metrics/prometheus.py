"""The server's metrics in Prometheus' text form, under the names of vLLM's: its dashboards and autoscalers work here.

GET /metrics calls `render`. Nothing is kept: the figures are read off the recorder and the engine's stats as they are.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.metrics.histogram import Histogram
from quire.metrics.residency import residency_histograms
from quire.metrics.serving import ServingMetrics
from quire.protocol.stats import EngineStats, SpeculationStats

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("model_name", "engine")
# The counters of `TierStats`, as they are called there before "_total".
_TIERS = {
    "num_swaps": "Preempted sequences whose blocks went to the host.",
    "swapped_out_blocks": "KV blocks copied to the host, evicted prefixes included.",
    "swapped_in_blocks": "KV blocks copied back.",
    "swapped_out_bytes": "Bytes of them.",
    "swapped_in_bytes": "Bytes of them.",
    "host_evictions": "KV blocks of prefixes that were evicted to the host.",
    "host_hits": "KV blocks of prefixes found on the host.",
    "disk_hits": "KV blocks of prefixes read from the disk.",
    "disk_misses": "KV blocks that should have been on the disk and were not.",
    "disk_written_blocks": "KV blocks written to the disk.",
    "disk_failed_writes": "KV blocks that the disk did not take.",
    "disk_damaged_files": "Files of KV blocks that were damaged or foreign, and ignored.",
    "disk_removed_files": "Files of KV blocks removed to stay within the limit.",
}


def render(metrics: ServingMetrics, stats: EngineStats, model_name: str, now: float) -> tuple[bytes, str]:
    """The body of an answer, and its content type."""
    metrics.advance(now)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Serving(metrics, stats, model_name))
    ProcessCollector(registry=registry)
    return generate_latest(registry), _CONTENT_TYPE


@dataclass(eq=False)
class _Serving(Collector):
    metrics: ServingMetrics
    stats: EngineStats
    model_name: str

    def collect(self) -> Iterator[Metric]:
        labels = (self.model_name, "0")
        for name, help, value in self._gauges():
            gauge = GaugeMetricFamily(name, help, labels=_LABELS)
            gauge.add_metric(labels, value)
            yield gauge
        waiting = GaugeMetricFamily(
            "quire:requests_waiting_by_reason", "Sequences that wait, by why.", labels=(*_LABELS, "reason")
        )
        for reason, count in self.stats.waiting_reasons.items():
            waiting.add_metric((*labels, reason), count)
        yield waiting
        if (limits := self.stats.limits) is not None:
            policy = GaugeMetricFamily(
                "quire:scheduling_policy_info", "The policy; always 1.", labels=(*_LABELS, "policy")
            )
            policy.add_metric((*labels, limits.policy), 1)
            yield policy
        for name, help, value in self._counters():
            counter = CounterMetricFamily(name, help, labels=_LABELS)
            counter.add_metric(labels, value)
            yield counter
        if self.stats.speculation is not None:
            yield from self._of_drafts(self.stats.speculation, labels)
        finished = CounterMetricFamily(
            "vllm:request_success", "Sequences that ended, by why.", labels=(*_LABELS, "finished_reason")
        )
        for reason, count in self.metrics.finished.items():
            finished.add_metric((*labels, reason), count)
        yield finished
        for histogram in [*self.metrics.histograms, *self._residency()]:
            family = HistogramMetricFamily(histogram.name, histogram.help, labels=_LABELS)
            buckets = [(_le(bound), count) for bound, count in histogram.cumulative()]
            family.add_metric(labels, buckets, histogram.total)
            yield family

    def _residency(self) -> list[Histogram]:
        histograms = residency_histograms()
        for histogram, counted in zip(histograms, self.stats.kv_block_residency, strict=False):
            histogram.counts, histogram.total = counted.counts, counted.total
        return histograms

    def _of_drafts(self, drafts: SpeculationStats, labels: tuple[str, str]) -> Iterator[Metric]:
        for name, help, value in (
            ("num_drafts", "Times that a sequence's drafts were verified.", drafts.num_drafts),
            ("num_draft_tokens", "Draft tokens verified.", drafts.num_draft_tokens),
            ("num_accepted_tokens", "Draft tokens accepted.", drafts.num_accepted_tokens),
        ):
            counter = CounterMetricFamily(f"vllm:spec_decode_{name}", help, labels=_LABELS)
            counter.add_metric(labels, value)
            yield counter
        name, help = "vllm:spec_decode_num_accepted_tokens_per_pos", "Those accepted, by place among the drafts."
        by_place = CounterMetricFamily(name, help, labels=(*_LABELS, "position"))
        for place, count in enumerate(drafts.num_accepted_tokens_per_pos):
            by_place.add_metric((*labels, str(place)), count)
        yield by_place

    def _gauges(self) -> Iterator[tuple[str, str, float]]:
        stats = self.stats
        yield "vllm:num_requests_running", "Sequences that are being computed.", stats.num_requests_running
        yield "vllm:num_requests_waiting", "Sequences that wait to be computed.", stats.num_requests_waiting
        yield "vllm:kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all.", stats.kv_cache_usage_perc
        if stats.limits is not None:
            yield "quire:max_num_seqs", "Most sequences that may run at once, now.", stats.limits.max_num_seqs
            tokens = stats.limits.max_num_batched_tokens
            yield "quire:max_num_batched_tokens", "Most tokens that a step may have, now.", tokens
        yield "quire:kv_blocks_shared", "KV blocks with more than one owner.", stats.kv_blocks_shared
        yield "quire:kv_blocks_pinned", "KV blocks of pinned prefixes.", stats.kv_blocks_pinned
        if stats.tiers is not None:
            usage = stats.tiers.host_cache_usage_perc
            yield "vllm:cpu_cache_usage_perc", "Share of the host's KV blocks that swapped sequences own.", usage
        stall = self.metrics.event_loop_max_stall
        yield "quire:event_loop_max_stall_seconds", "Longest time that the event loop was held up.", stall

    def _counters(self) -> Iterator[tuple[str, str, int]]:
        metrics, stats = self.metrics, self.stats
        yield "vllm:prompt_tokens", "Prompt tokens of requests whose first token came.", metrics.num_prompt_tokens
        yield "vllm:prompt_tokens_cached", "Those taken from the prefix cache.", metrics.num_cached_prompt_tokens
        yield "vllm:generation_tokens", "Tokens generated.", metrics.num_generation_tokens
        queries, hits = stats.prefix_cache_queries_total, stats.prefix_cache_hits_total
        yield "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", queries
        yield "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", hits
        evictions = stats.prefix_cache_evictions_total
        yield "quire:prefix_cache_evictions", "KV blocks whose cached content made room.", evictions
        yield "vllm:num_preemptions", "Sequences whose blocks were taken from them.", stats.num_preemptions_total
        yield "quire:forks", "Sequences that began with the blocks of another.", stats.num_forks_total
        if stats.tiers is not None:
            for name, help in _TIERS.items():
                yield f"quire:{name}", help, getattr(stats.tiers, f"{name}_total")


def _le(bound: float) -> str:
    """As the Prometheus client writes a bound."""
    return "+Inf" if bound == float("inf") else str(float(bound))
