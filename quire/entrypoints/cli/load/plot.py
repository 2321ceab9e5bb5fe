"""Draws a load test as one self-contained SVG: a timeline of the requests, and how TTFT and ITL are distributed.

It follows the reader's light or dark colours. Must not know how the load was made.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from quire.entrypoints.cli.load.outcome import Outcome
from quire.entrypoints.cli.svg import Box, axis, curve, document, text

_STYLE = """.held { stroke: #9aa4ae } .first { stroke: #e8a33d } .failed { stroke: #d23f57 }
.generating, .curve { stroke: #3a7bd5 }
"""

_TIMELINE = "Requests over time (s): grey held back, orange until the first token, blue generating, red failed"


def render(outcomes: Sequence[Outcome], figures: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """The SVG document."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    title = (
        f"{facts['model_id']}: {facts['num_prompts']:,} requests in {figures['duration']:.1f} s (request rate "
        f"{facts['request_rate']}), {figures['output_throughput']:,.0f} output tokens/s, {figures['failed']:,} failed"
    )
    parts = [
        *_timeline((56, 80, 850, 300), outcomes),
        *_distribution((56, 450, 390, 200), "Time to first token", [outcome.ttft for outcome in good]),
        *_distribution((516, 450, 390, 200), "Inter-token latency", [gap for outcome in good for gap in outcome.itls]),
    ]
    return document(960, 700, title, _STYLE, parts)


def _timeline(box: Box, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """A line per request, by arrival from top to bottom."""
    x, y, width, height = box
    ordered = sorted(outcomes, key=lambda outcome: outcome.arrival)
    zero = ordered[0].arrival if ordered else 0.0
    span = max([outcome.end - zero for outcome in ordered] + [1e-6])
    yield from axis(box, span, _TIMELINE)
    pitch = min(height / max(len(ordered), 1), 14.0)
    for row, outcome in enumerate(ordered):
        phases = [("held", outcome.arrival, outcome.start), ("failed", outcome.start, outcome.end)]
        if outcome.error is None:
            first = outcome.token_times[0]
            phases[1:] = [("first", outcome.start, first), ("generating", first, outcome.end)]
        for name, start, end in phases:
            left, right = (x + width * (time - zero) / span for time in (start, end))
            line = f"M{left:.1f} {y + pitch * (row + 0.5):.2f}H{right:.1f}"
            yield f'<path class="{name}" stroke-width="{pitch * 0.8:.2f}" d="{line}"/>'


def _distribution(box: Box, label: str, seconds: Sequence[float]) -> Iterator[str]:
    """The share of the values up to x, for x up to the 99th percentile."""
    x, y, width, height = box
    values = np.array(seconds or [0.0]) * 1000
    median, p99 = np.percentile(values, [50, 99])
    span = max(float(p99), 1e-3)
    yield from axis(box, span, f"{label} (ms): median {median:,.4g}, p99 {p99:,.4g}" if seconds else f"{label}: none")
    yield from (text(x - 6, y + height * (1 - share / 100) + 4, f"{share}%", "end") for share in (0, 50, 100))
    shares = np.linspace(0, 99, 199)
    points = zip(x + width * np.percentile(values, shares) / span, y + height * (1 - shares / 100), strict=True)
    yield curve(list(points), "curve")
