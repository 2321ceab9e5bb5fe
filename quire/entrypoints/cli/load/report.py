"""The figures of a load test, under the names that vLLM's users know, and the table that shows them.

Latencies are those of the requests that succeeded. Must not know how requests are made or sent.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from quire.entrypoints.cli.bench import percentile
from quire.entrypoints.cli.load.outcome import Outcome

METRICS = {
    "ttft": "Time to first token (TTFT)",
    "tpot": "Time per output token (TPOT)",
    "itl": "Inter-token latency (ITL)",
    "e2el": "End-to-end latency (E2EL)",
}
_WIDTH = 34  # of the names in the table


def figures(
    outcomes: Sequence[Outcome],
    duration: float,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput: Mapping[str, float],
) -> dict[str, Any]:
    """All figures of a run.

    Args:
        duration: seconds from the first request's start to the last one's end.
        metrics: those of METRICS to tell of, in order.
        goodput: upper bounds in milliseconds by metric; a request that keeps them all is good.
    """
    good = [outcome for outcome in outcomes if outcome.error is None]
    num_input = sum(outcome.num_prompt_tokens for outcome in good)
    num_output = sum(outcome.num_output_tokens for outcome in good)
    kept = sum(all(getattr(outcome, name) * 1000 <= limit for name, limit in goodput.items()) for outcome in good)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "errors_by_kind": dict(Counter(outcome.error for outcome in outcomes if outcome.error).most_common()),
        "error_examples": {outcome.error: outcome.error_message for outcome in reversed(outcomes) if outcome.error},
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration,
        "request_goodput": kept / duration if goodput else None,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "max_output_tokens_per_s": _busiest_second(good),
        "max_concurrent_requests": _peak_concurrency(outcomes),
    }
    values = {
        "ttft": [outcome.ttft for outcome in good],
        "tpot": [outcome.tpot for outcome in good if outcome.num_output_tokens > 1],
        "itl": [gap for outcome in good for gap in outcome.itls],
        "e2el": [outcome.e2el for outcome in good],
    }
    for name in metrics:
        result |= _summary(name, sorted(value * 1000 for value in values[name]), percentiles)
    return result


def details(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """What `--save-detailed` adds: a value per request; seconds, from the first request's arrival where absolute."""
    zero = min((outcome.arrival for outcome in outcomes), default=0.0)
    return {
        "input_lens": [outcome.num_prompt_tokens for outcome in outcomes],
        "output_lens": [outcome.num_output_tokens for outcome in outcomes],
        "start_times": [outcome.start - zero for outcome in outcomes],
        "queue_times": [outcome.start - outcome.arrival for outcome in outcomes],
        "ttfts": [outcome.ttft if outcome.token_times else None for outcome in outcomes],
        "itls": [outcome.itls for outcome in outcomes],
        "latencies": [outcome.e2el for outcome in outcomes],
        "errors": [outcome.error_message if outcome.error else "" for outcome in outcomes],
    }


def table(result: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The figures for people."""
    rows = [
        ("Requests completed, failed", f"{result['completed']:,}, {result['failed']:,}"),
        ("Duration", f"{result['duration']:.2f} s"),
        ("Tokens in, out", f"{result['total_input_tokens']:,}, {result['total_output_tokens']:,}"),
        ("Request throughput", f"{result['request_throughput']:.2f} /s"),
        ("Output token throughput", f"{result['output_throughput']:,.1f} /s"),
        ("  in the busiest second", f"{result['max_output_tokens_per_s']:,.0f} /s"),
        ("Total token throughput", f"{result['total_token_throughput']:,.1f} /s"),
        ("Peak concurrent requests", f"{result['max_concurrent_requests']:,}"),
    ]
    if result["request_goodput"] is not None:
        rows.insert(4, ("Request goodput", f"{result['request_goodput']:.2f} /s"))
    lines = [f"{name:<{_WIDTH}}{value}" for name, value in rows]
    statistics = ["mean", "median", "std", *(f"p{p:g}" for p in percentiles)]
    lines += ["", f"{'Milliseconds':<{_WIDTH}}" + "".join(f"{statistic:>10}" for statistic in statistics)]
    for name in metrics:
        cells = [f"{result[f'{statistic}_{name}_ms']:>10,.2f}" for statistic in statistics]
        lines.append(f"{METRICS[name]:<{_WIDTH}}" + "".join(cells))
    if result["errors_by_kind"]:
        lines += ["", "Failures"]
        for kind, count in result["errors_by_kind"].items():
            lines.append(f"{count:>7,} x {kind}: {result['error_examples'][kind]}")
    return "\n".join(lines)


def _summary(name: str, ordered: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles; zeros where there is no value, as vLLM has it."""
    ordered = ordered or [0.0]
    mean = math.fsum(ordered) / len(ordered)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered))
    result = {f"mean_{name}_ms": mean, f"median_{name}_ms": percentile(ordered, 50), f"std_{name}_ms": deviation}
    return result | {f"p{p:g}_{name}_ms": percentile(ordered, p) for p in percentiles}


def _busiest_second(outcomes: Sequence[Outcome]) -> float:
    """Most chunks that came in one second, counted from the first request's start."""
    zero = min((outcome.start for outcome in outcomes), default=0.0)
    seconds = Counter(int(time - zero) for outcome in outcomes for time in outcome.token_times)
    return float(max(seconds.values(), default=0))


def _peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """Most requests under way at one time; one that ends as another starts makes room for it."""
    events = sorted([(outcome.start, 1) for outcome in outcomes] + [(outcome.end, -1) for outcome in outcomes])
    now = peak = 0
    for _, change in events:
        now += change
        peak = max(peak, now)
    return peak
