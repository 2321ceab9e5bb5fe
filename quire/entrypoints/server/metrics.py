"""What happened to the server's requests: counters, histograms under vLLM's names, and the last minutes' history.

It observes an AsyncLLM, on the event loop's thread; /metrics, the log line and the live view read it. It keeps a few
numbers for each live request, forgets the request when it ends, and knows nothing of engines, clients or Prometheus.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from quire.engine.observer import Observer
from quire.entrypoints.server.history import History
from quire.metrics.histogram import Histogram
from quire.protocol.requests import NewRequest, PoolingTask
from quire.protocol.stats import EngineStats

# vLLM's bounds, so that its dashboards show what they show there.
_FIRST_TOKEN_SECONDS = [
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
]
_TOKEN_SECONDS = [
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
]
_REQUEST_SECONDS = [
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
]
_STEP_TOKENS = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
_NUM_SEQUENCES = [1, 2, 5, 10, 20]
FINE = [1e-4 * 10 ** (step / 24) for step in range(143)]  # seconds, 10% apart: for the history's percentiles
_FINISH_REASONS = ("stop", "length", "abort", "error")  # there from the start, so that rates are


@dataclass(slots=True)
class _Sequence:
    """When one sequence's tokens came."""

    first: float
    last: float
    num_tokens: int


@dataclass(slots=True)
class _Request:
    """What is known of a live request."""

    num_prompt_tokens: int
    max_tokens: int  # 0: its prompt is pooled
    n: int
    arrival: float
    adapter: str  # its name; "": none
    scheduled: float | None = None
    sequences: dict[int, _Sequence] = field(default_factory=dict[int, _Sequence])


class ServingMetrics(Observer):
    """Counters and histograms of one server, since its start.

    Every time is in seconds of the monotonic clock. What is said of a request that is not live is not counted.

    Attributes:
        event_loop_max_stall: the longest time in seconds that the event loop was held up; whoever watches it sets it.
    """

    def __init__(self, max_model_len: int = 32_768) -> None:
        """`max_model_len` bounds the histograms of token counts."""
        self.num_prompt_tokens = self.num_cached_prompt_tokens = self.num_generation_tokens = 0
        self.finished: Counter[str] = Counter(dict.fromkeys(_FINISH_REASONS, 0))  # finish reason -> sequences
        self.event_loop_max_stall = 0.0
        self.histograms: list[Histogram] = []
        self._add_histograms(one_two_five(max_model_len))
        self.history = History([self._inter_token, self._first_token, self._queue])
        self._requests: dict[str, _Request] = {}
        self._step_time, self._tokens_before_step = 0.0, 0

    def _add_histograms(self, counts: list[float]) -> None:
        def add(name: str, help: str, bounds: Sequence[float], finer: Sequence[float] = ()) -> Histogram:
            self.histograms.append(Histogram(f"vllm:{name}", help, bounds, finer))
            return self.histograms[-1]

        seconds, tokens = _REQUEST_SECONDS, _TOKEN_SECONDS
        self._first_token = add("time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_SECONDS, FINE)
        self._inter_token = add("inter_token_latency_seconds", "Between a sequence's tokens.", tokens, FINE)
        self._per_token = add("request_time_per_output_token_seconds", "Mean between a sequence's tokens.", tokens)
        self._latency = add("e2e_request_latency_seconds", "Arrival to end.", seconds)
        self._queue = add("request_queue_time_seconds", "Arrival to the first step.", seconds, FINE)
        self._prefill = add("request_prefill_time_seconds", "First step to first token.", seconds)
        self._decode = add("request_decode_time_seconds", "First token to last token.", seconds)
        self._inference = add("request_inference_time_seconds", "First step to last token.", seconds)
        self._prompt_length = add("request_prompt_tokens", "Tokens of a request's prompt.", counts)
        self._output_length = add("request_generation_tokens", "Tokens of a request's outputs.", counts)
        self._computed = add("request_prefill_kv_computed_tokens", "Those of a prompt that no cache held.", counts)
        self._longest_output = add("request_max_num_generation_tokens", "Tokens of a request's longest output.", counts)
        self._n = add("request_params_n", "Requests' n.", _NUM_SEQUENCES)
        self._max_tokens = add("request_params_max_tokens", "Requests' max_tokens.", counts)
        self._step_tokens = add("iteration_tokens_total", "Prompt and output tokens of an engine step.", _STEP_TOKENS)

    def on_arrival(self, request: NewRequest, n: int) -> None:
        """A request was accepted, of which `n` sequences will be told."""
        sizes = len(request.prompt_token_ids), request.task.max_tokens * (not isinstance(request.task, PoolingTask)), n
        adapter = request.adapter.name if request.adapter else ""
        self._requests[request.request_id] = _Request(*sizes, request.arrival_time, adapter)

    def adapters(self, running: bool) -> set[str]:
        """Names of the adapters of requests that were scheduled, or of those that wait for that."""
        adapters = ((one.adapter, one.scheduled is not None) for one in self._requests.values())
        return {name for name, is_scheduled in adapters if name and is_scheduled is running}

    def on_scheduled(self, request_id: str, now: float) -> None:
        """A step computed some of a request; only the first time counts."""
        if (request := self._requests.get(request_id)) is not None and request.scheduled is None:
            request.scheduled = now
            self._queue.observe(now - request.arrival)

    def on_tokens(self, request_id: str, sequence_index: int, num_tokens: int, now: float) -> None:
        """A step brought tokens of a sequence; calls with the same `now` are of one step."""
        if (request := self._requests.get(request_id)) is None or not num_tokens:
            return
        if now != self._step_time:
            self.advance(now)
        num_tokens *= request.max_tokens > 0  # the one that ends a pooled prompt is none
        self.num_generation_tokens += num_tokens
        if (sequence := request.sequences.get(sequence_index)) is None:
            if not request.sequences:  # the request's first
                self.num_prompt_tokens += request.num_prompt_tokens
                self._first_token.observe(now - request.arrival)
                if request.scheduled is not None:
                    self._prefill.observe(now - request.scheduled)
            request.sequences[sequence_index] = _Sequence(now, now, num_tokens)
        else:
            self._inter_token.observe(now - sequence.last)
            sequence.last = now
            sequence.num_tokens += num_tokens

    def on_finished(self, request_id: str, reasons: list[str], num_cached_tokens: int, now: float) -> None:
        """A request ended, each of its sequences for a reason."""
        if (request := self._requests.pop(request_id, None)) is None:
            return
        self.finished.update(reasons)
        self._latency.observe(now - request.arrival)
        self._prompt_length.observe(request.num_prompt_tokens)
        self._n.observe(request.n)
        self._max_tokens.observe(request.max_tokens)
        sequences = request.sequences.values()
        self._output_length.observe(sum(sequence.num_tokens for sequence in sequences))
        self._longest_output.observe(max((sequence.num_tokens for sequence in sequences), default=0))
        if not sequences:
            return
        self.num_cached_prompt_tokens += num_cached_tokens
        self._computed.observe(request.num_prompt_tokens - num_cached_tokens)
        last = max(sequence.last for sequence in sequences)
        self._decode.observe(last - min(sequence.first for sequence in sequences))
        if request.scheduled is not None:
            self._inference.observe(last - request.scheduled)
        for sequence in sequences:
            if sequence.num_tokens > 1:
                self._per_token.observe((sequence.last - sequence.first) / (sequence.num_tokens - 1))

    def on_engine_stats(self, stats: EngineStats, now: float) -> None:
        """The engine's newest figures."""
        self.advance(now)
        self.history.see(stats)

    def advance(self, now: float) -> None:
        """End the step, and the seconds, before `now`; for those who read the history while nothing happens."""
        num_tokens = self.num_prompt_tokens + self.num_generation_tokens
        if num_tokens > self._tokens_before_step:
            self._step_tokens.observe(num_tokens - self._tokens_before_step)
        self._step_time, self._tokens_before_step = now, num_tokens
        self.history.advance(now, (self.num_prompt_tokens, self.num_generation_tokens, self.finished["error"]))


def figures_of(stats: EngineStats, are_counters: bool) -> Iterator[tuple[str, str, Any]]:
    """Name, help and value of what the stats' own types tell of: counters since the start, or gauges of the moment."""
    for part in filter(None, (stats, stats.limits, stats.tiers, stats.speculation)):
        for own in structs.fields(part):
            told, is_counter = getattr(own.type, "__metadata__", ()), part is stats.speculation
            if told and (is_counter or own.name.endswith("_total")) == are_counters:
                help, name = (*told, f"quire:{own.name.removesuffix('_total')}")[:2]
                yield name, help, getattr(part, own.name)


def one_two_five(largest: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... up to `largest`."""
    bounds = [float(mantissa * 10**power) for power in range(len(str(largest))) for mantissa in (1, 2, 5)]
    return [bound for bound in bounds if bound <= largest]
