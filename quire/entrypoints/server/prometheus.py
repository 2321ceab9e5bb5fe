"""The server's metrics in Prometheus' text form, under the names of vLLM's: its dashboards and autoscalers work here.

GET /metrics calls `render`. The figures are read off the recorder and the engine's stats as they are, and kept here for
HTTP alone, which no other part of the server counts.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, generate_latest
from prometheus_client import metrics_core as core
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from quire.config.engine_args import EngineConfig
from quire.entrypoints.server.metrics import ServingMetrics, figures_of
from quire.kvcache.residency import residency_histograms
from quire.metrics.histogram import Histogram
from quire.protocol.stats import SLEEP_STATES, EngineStats

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_OF_CACHE = ("block_size", "enable_prefix_caching", "gpu_memory_utilization", "swap_space")  # options, and vLLM's too
_PREPARING = ("prefix", "disk", "adapter", "grammar", "result", "siblings")  # reasons to wait that are no lack of room
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")  # any other word is a client's own
_SECONDS = [0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60]
# Of HTTP, as prometheus-fastapi-instrumentator has it on vLLM's server: name -> help, labels, bounds (none: a summary).
_OF_HTTP: dict[str, tuple[str, tuple[str, ...], list[float]]] = {
    "http_request_size_bytes": ("Length of bodies, by what their headers say.", ("handler",), []),
    "http_response_size_bytes": ("Length of answers likewise, 0 of streams.", ("handler",), []),
    "http_request_duration_highr_seconds": ("First byte to the answer's end.", (), _SECONDS),
    "http_request_duration_seconds": ("The same, by route.", ("method", "handler"), [0.1, 0.5, 1.0]),
}
# Name, help, and value; or labels, and a value for each of theirs.
_Figure = tuple[str, str, float | tuple[tuple[str, ...], Mapping[tuple[str, ...], float]]]


def render(sources: "Sequence[Figures]", http: "HttpCounts", now: float) -> tuple[bytes, str]:
    """The body of an answer, and its content type.

    Each engine's figures have its number as their label "engine", the server's own an empty one, which is none, where
    there are several. Those of several models have each its name.
    """
    families = _Families()
    for source in sources:
        source.metrics.advance(now)
        source.add_to(families)
    http.add_to(families)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(families)
    ProcessCollector(registry=registry)
    return generate_latest(registry), _CONTENT_TYPE


@dataclass
class Figures:
    """What there is to tell of a model."""

    metrics: ServingMetrics
    stats: Sequence[EngineStats]
    model_name: str
    config: EngineConfig | None = None  # while it is loaded
    num_blocks: int = 0  # KV blocks of all engines, which have as many each

    def add_to(self, families: "_Families") -> None:
        """Add it to what others tell."""
        engines = [(str(rank), stats) for rank, stats in enumerate(self.stats)]
        server = "0" if len(engines) == 1 else ""
        stall = "Longest time that the event loop was held up.", self.metrics.event_loop_max_stall
        gauges = [(server, iter([("quire:event_loop_max_stall_seconds", *stall)]))]
        gauges += [(engine, self._gauges(stats)) for engine, stats in engines]
        counters = [(server, self._server_counters()), *((engine, self._counters(stats)) for engine, stats in engines)]
        for kind, sources in ((core.GaugeMetricFamily, gauges), (core.CounterMetricFamily, counters)):
            for engine, figures in sources:
                for name, help, value in figures:
                    own, values = value if isinstance(value, tuple) else ((), {(): value})
                    for shown, figure in values.items():
                        labels = self._labels(engine) | dict(zip(own, shown, strict=True))
                        families.add(kind, name, help, labels, figure)
        histograms = [(server, histogram) for histogram in self.metrics.histograms]
        histograms += [(engine, histogram) for engine, stats in engines for histogram in _residency(stats)]
        for engine, histogram in histograms:
            families.add_histogram(histogram, self._labels(engine))

    def _labels(self, engine: str) -> dict[str, str]:
        return {"model_name": self.model_name, "engine": engine}

    def _gauges(self, stats: EngineStats) -> Iterator[_Figure]:
        yield from figures_of(stats, are_counters=False)
        states = {state: int(state == stats.sleep_state) for state in SLEEP_STATES}
        yield "vllm:engine_sleep_state", "Whether the engine is in it: 1.", _by("sleep_state", states)
        deferred = sum(stats.waiting_reasons.get(reason, 0) for reason in _PREPARING)
        kinds = {"capacity": stats.num_requests_waiting - deferred, "deferred": deferred}
        yield "vllm:num_requests_waiting_by_reason", "Those that wait for room, or for another.", _by("reason", kinds)
        yield "quire:requests_waiting_by_reason", "Sequences that wait, by why.", _by("reason", stats.waiting_reasons)
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
        yield from figures_of(stats, are_counters=True)
        if (drafts := stats.speculation) is not None:
            by_place = {str(place): count for place, count in enumerate(drafts.num_accepted_tokens_per_pos)}
            help = "Those accepted, by place among the drafts."
            yield "vllm:spec_decode_num_accepted_tokens_per_pos", help, _by("position", by_place)


class HttpCounts:
    """HTTP requests by route, whichever model they are for: how many, how large, how long they took."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, str]] = Counter()  # by method, status and route
        self._observed: dict[tuple[str, ...], Histogram] = {}  # by name, and the values of its labels

    def count(self, method: str, status: int, handler: str, num_bytes: tuple[int, int], seconds: float) -> None:
        """A request has ended; `handler`: its route, `num_bytes`: of its body and of its answer's."""
        own = {"method": method if method in _METHODS else "other", "handler": handler}
        self._requests[own["method"], f"{status // 100}xx", handler] += 1
        for (name, (help, labels, bounds)), value in zip(_OF_HTTP.items(), (*num_bytes, seconds, seconds), strict=True):
            key = name, *(own[label] for label in labels)
            if key not in self._observed:
                self._observed[key] = Histogram(name, help, bounds)
            self._observed[key].observe(value)

    def add_to(self, families: "_Families") -> None:
        """Add them to what the models tell."""
        for (method, status, handler), number in self._requests.items():
            labels = {"method": method, "status": status, "handler": handler}
            families.add(core.CounterMetricFamily, "http_requests", "HTTP requests.", labels, number)
        for (name, *values), histogram in self._observed.items():
            families.add_histogram(histogram, dict(zip(_OF_HTTP[name][1], values, strict=True)))


class _Families(Collector):
    """By name: figures and all their labels."""

    def __init__(self) -> None:
        self._by_name: dict[str, Any] = {}

    def collect(self) -> Iterable[Metric]:
        return self._by_name.values()

    def add(self, kind: Callable[..., Any], name: str, help: str, labels: Mapping[str, str], *figure: Any) -> None:
        family = self._by_name.get(name) or self._by_name.setdefault(name, kind(name, help, labels=(*labels,)))
        family.add_metric((*labels.values(),), *figure)

    def add_histogram(self, seen: Histogram, labels: Mapping[str, str]) -> None:
        """Or a summary, where it has no bounds."""
        buckets = [(floatToGoString(bound), count) for bound, count in seen.cumulative()]
        kind = core.HistogramMetricFamily if seen.bounds else core.SummaryMetricFamily
        self.add(kind, seen.name, seen.help, labels, buckets if seen.bounds else seen.counts[0], seen.total)


def _by(label: str, values: Mapping[str, float]) -> tuple[tuple[str], Mapping[tuple[str, ...], float]]:
    return (label,), {(own,): value for own, value in values.items()}


def _residency(stats: EngineStats) -> list[Histogram]:
    histograms = residency_histograms()
    for histogram, counted in zip(histograms, stats.kv_block_residency, strict=False):
        histogram.counts, histogram.total = counted.counts, counted.total
    return histograms
