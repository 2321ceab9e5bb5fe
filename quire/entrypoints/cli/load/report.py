"""The figures of a load test, under the names that vLLM's users know, and the table that shows them.

Latencies are those of the requests that succeeded. Must not know how requests are made or sent.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quire.entrypoints.cli.load.outcome import Outcome

_METRICS = {
    "ttft": "Time to first token (TTFT)",
    "tpot": "Time per output token (TPOT)",
    "itl": "Inter-token latency (ITL)",
    "e2el": "End-to-end latency (E2EL)",
}
_STATISTICS = {"mean": np.mean, "std": np.std, "median": np.median}
_DETAILS = {  # vLLM's names, and whose they are in an outcome
    **{"input_lens": "num_prompt_tokens", "output_lens": "num_output_tokens", "itls": "itls"},
    **{"latencies": "e2el", "start_times": "start", "errors": "error_message"},
}
_WIDTH = 34  # of the names in the table


def figures(
    outcomes: Sequence[Outcome], duration: float, goodput: Mapping[str, float], percentiles: Sequence[float]
) -> dict[str, Any]:
    """All figures of a run of `duration` seconds; a good request keeps all bounds of `goodput` (in milliseconds)."""
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
    }
    seconds = {
        "ttft": [outcome.ttft for outcome in good],
        "tpot": [outcome.tpot for outcome in good if outcome.num_output_tokens > 1],
        "itl": [gap for outcome in good for gap in outcome.itls],
        "e2el": [outcome.e2el for outcome in good],
    }
    for name in _METRICS:
        values = np.array(seconds[name] or [0.0]) * 1000  # zeros where there is no value, as vLLM has it
        result |= {f"{statistic}_{name}_ms": float(of(values)) for statistic, of in _STATISTICS.items()}
        result |= {f"p{share:g}_{name}_ms": float(np.percentile(values, share)) for share in percentiles}
    return result


def details(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """Of each request what vLLM's scripts read."""
    ttfts = [outcome.ttft if outcome.token_times else 0.0 for outcome in outcomes]
    return {"ttfts": ttfts} | {key: [getattr(one, name) for one in outcomes] for key, name in _DETAILS.items()}


def table(result: Mapping[str, Any]) -> str:
    """The figures for people."""
    rows = [
        ("Requests completed, failed", f"{result['completed']:,}, {result['failed']:,}"),
        ("Duration", f"{result['duration']:.2f} s"),
        ("Tokens in, out", f"{result['total_input_tokens']:,}, {result['total_output_tokens']:,}"),
        ("Request throughput", f"{result['request_throughput']:.2f} /s"),
        ("Output token throughput", f"{result['output_throughput']:,.1f} /s"),
        ("Total token throughput", f"{result['total_token_throughput']:,.1f} /s"),
    ]
    if result["request_goodput"] is not None:
        rows.insert(4, ("Request goodput", f"{result['request_goodput']:.2f} /s"))
    lines = [f"{name:<{_WIDTH}}{value}" for name, value in rows]
    statistics = [key.removesuffix("_ttft_ms") for key in result if key.endswith("_ttft_ms")]
    lines += ["", f"{'Milliseconds':<{_WIDTH}}" + "".join(f"{statistic:>10}" for statistic in statistics)]
    for name, title in _METRICS.items():
        cells = [f"{result[f'{statistic}_{name}_ms']:>10,.2f}" for statistic in statistics]
        lines.append(f"{title:<{_WIDTH}}" + "".join(cells))
    if result["errors_by_kind"]:
        lines += ["", "Failures"]
        examples = result["error_examples"]
        lines += [f"{count:>7,} x {kind}: {examples[kind]}" for kind, count in result["errors_by_kind"].items()]
    return "\n".join(lines)
