"""The server's metrics in Prometheus' text form, under the names of vLLM's: its dashboards and autoscalers work here.

GET /metrics calls `render`. Nothing is kept: the figures are read off the recorder and the engine's stats as they are.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from quire.config.engine_args import EngineConfig
from quire.entrypoints.server.metrics import ServingMetrics
from quire.kvcache.residency import residency_histograms
from quire.metrics.histogram import Histogram
from quire.protocol.stats import SLEEP_STATES, EngineStats

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("model_name", "engine")
_OF_CACHE = ("block_size", "enable_prefix_caching", "gpu_memory_utilization", "swap_space")  # options, and vLLM's too
_PREPARING = ("prefix", "disk", "adapter", "grammar", "result", "siblings")  # reasons to wait that are no lack of room
# Name, help, and value; or labels, and a value for each of theirs.
_Figure = tuple[str, str, float | tuple[tuple[str, ...], Mapping[tuple[str, ...], float]]]


def render(sources: "Sequence[Figures]", now: float) -> tuple[bytes, str]:
    """The body of an answer, and its content type.

    Each engine's figures have its number as their label "engine", the server's own an empty one, which is none, where
    there are several. Those of several models have each its name.
    """
    for source in sources:
        source.metrics.advance(now)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(sources[0] if len(sources) == 1 else _All(sources))
    ProcessCollector(registry=registry)
    return generate_latest(registry), _CONTENT_TYPE


@dataclass(eq=False)
class _All(Collector):
    sources: "Sequence[Figures]"

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for family in (family for source in self.sources for family in source.collect()):
            if (first := families.setdefault(family.name, family)) is not family:
                first.samples += family.samples
        yield from families.values()


@dataclass(eq=False)
class Figures(Collector):
    """What there is to tell of a model."""

    metrics: ServingMetrics
    stats: Sequence[EngineStats]
    model_name: str
    config: EngineConfig | None = None  # while it is loaded
    num_blocks: int = 0  # KV blocks of all engines, which have as many each

    def collect(self) -> Iterator[Metric]:
        engines = [(str(rank), stats) for rank, stats in enumerate(self.stats)]
        server = "0" if len(engines) == 1 else ""
        stall = "Longest time that the event loop was held up.", self.metrics.event_loop_max_stall
        gauges = [(server, iter([("quire:event_loop_max_stall_seconds", *stall)]))]
        gauges += [(engine, self._gauges(stats)) for engine, stats in engines]
        counters = [(server, self._server_counters()), *((engine, self._counters(stats)) for engine, stats in engines)]
        for kind, sources in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            families: dict[str, Any] = {}
            for engine, figures in sources:
                for name, help, value in figures:
                    own, values = value if isinstance(value, tuple) else ((), {(): value})
                    family = families.get(name) or families.setdefault(name, kind(name, help, labels=(*_LABELS, *own)))
                    for shown, figure in values.items():
                        family.add_metric((self.model_name, engine, *shown), figure)
            yield from families.values()
        histograms = [(server, histogram) for histogram in self.metrics.histograms]
        histograms += [(engine, histogram) for engine, stats in engines for histogram in _residency(stats)]
        named: dict[str, HistogramMetricFamily] = {}
        for engine, histogram in histograms:
            name, made = histogram.name, HistogramMetricFamily(histogram.name, histogram.help, labels=_LABELS)
            family = named.setdefault(name, made)
            buckets = [(floatToGoString(bound), count) for bound, count in histogram.cumulative()]
            family.add_metric((self.model_name, engine), buckets, histogram.total)
        yield from named.values()

    def _gauges(self, stats: EngineStats) -> Iterator[_Figure]:
        yield from _told(stats, are_counters=False)
        states = {state: int(state == stats.sleep_state) for state in SLEEP_STATES}
        yield "vllm:engine_sleep_state", "Whether the engine is in it: 1.", _by("sleep_state", states)
        deferred = sum(stats.waiting_reasons.get(reason, 0) for reason in _PREPARING)
        kinds = {"capacity": stats.num_requests_waiting - deferred, "deferred": deferred}
        yield "vllm:num_requests_waiting_by_reason", "Those that wait for room, or for another.", _by("reason", kinds)
        reasons = _by("reason", stats.waiting_reasons)
        yield "quire:requests_waiting_by_reason", "Sequences that wait, by why.", reasons
        if stats.limits is not None:
            yield "quire:scheduling_policy_info", "The policy; always 1.", _by("policy", {stats.limits.policy: 1})

        if self.config is not None:
            args = self.config.args
            cache = {name: str(getattr(args, name)) for name in _OF_CACHE} | {"cache_dtype": args.kv_cache_dtype}
            cache["num_gpu_blocks"] = str(self.num_blocks // len(self.stats))
            yield "vllm:cache_config_info", "The KV cache; always 1.", ((*cache,), {(*cache.values(),): 1})
            if args.enable_lora:
                of_requests = [",".join(sorted(self.metrics.adapters(running))) for running in (True, False)]
                loras = ("running_lora_adapters", "waiting_lora_adapters", "max_lora")
                told = {(*of_requests, str(args.max_loras)): time.time()}
                yield "vllm:lora_requests_info", "Adapters of requests; the time.", (loras, told)

    def _server_counters(self) -> Iterator[_Figure]:
        metrics = self.metrics
        yield "vllm:prompt_tokens", "Prompt tokens of requests whose first token came.", metrics.num_prompt_tokens
        yield "vllm:prompt_tokens_cached", "Those taken from the prefix cache.", metrics.num_cached_prompt_tokens
        yield "vllm:generation_tokens", "Tokens generated.", metrics.num_generation_tokens
        yield "vllm:request_success", "Sequences that ended, by why.", _by("finished_reason", metrics.finished)

    def _counters(self, stats: EngineStats) -> Iterator[_Figure]:
        yield from _told(stats, are_counters=True)
        if (drafts := stats.speculation) is not None:
            by_place = {str(place): count for place, count in enumerate(drafts.num_accepted_tokens_per_pos)}
            help = "Those accepted, by place among the drafts."
            yield "vllm:spec_decode_num_accepted_tokens_per_pos", help, _by("position", by_place)


def _told(stats: EngineStats, are_counters: bool) -> Iterator[_Figure]:
    """What the stats' own types tell of: counters since the start, or gauges of the moment."""
    for part in filter(None, (stats, stats.limits, stats.tiers, stats.speculation)):
        for field in structs.fields(part):
            told, is_counter = getattr(field.type, "__metadata__", ()), part is stats.speculation
            if told and (is_counter or field.name.endswith("_total")) == are_counters:
                help, name = (*told, f"quire:{field.name.removesuffix('_total')}")[:2]
                yield name, help, getattr(part, field.name)


def _by(label: str, values: Mapping[str, float]) -> tuple[tuple[str], Mapping[tuple[str, ...], float]]:
    return (label,), {(own,): value for own, value in values.items()}


def _residency(stats: EngineStats) -> list[Histogram]:
    histograms = residency_histograms()
    for histogram, counted in zip(histograms, stats.kv_block_residency, strict=False):
        histogram.counts, histogram.total = counted.counts, counted.total
    return histograms
