"""Draws a load test as one self-contained SVG: a timeline of the requests, and how TTFT and ITL are distributed.

It follows the reader's light or dark colours. Must not know how the load was made.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from quire.entrypoints.cli.bench import percentile
from quire.entrypoints.cli.load.outcome import Outcome

_WIDTH, _MARGIN = 960, 56
_TIMELINE = (_MARGIN, 130, _WIDTH - 2 * _MARGIN, 330)  # x, y, width, height
_CURVES = ((_MARGIN, 570, 392, 210), (_WIDTH - _MARGIN - 392, 570, 392, 210))
_HEIGHT = 840
_STYLE = """
svg { color-scheme: light dark; font: 12px system-ui, sans-serif;
  --page: #fff; --ink: #1c2024; --soft: #68727c; --line: #dfe3e7;
  --held: #c3c9cf; --first: #e8a33d; --decode: #3a7bd5; --failed: #d23f57 }
@media (prefers-color-scheme: dark) { svg {
  --page: #14171a; --ink: #e9ecef; --soft: #97a1ab; --line: #2e343a;
  --held: #56606a; --first: #e0a045; --decode: #5b9bf0; --failed: #ef6c81 } }
.page { fill: var(--page) } text { fill: var(--soft) } .title { font-size: 19px; font-weight: 600 }
.title, .value, text.head, tspan.head { fill: var(--ink) } .head { font-weight: 600 }
path { fill: none; stroke: currentColor } tspan { fill: currentColor }
.held { color: var(--held) } .first { color: var(--first) } .decode { color: var(--decode) }
.failed { color: var(--failed) } .grid { color: var(--line) }
.curve { color: var(--decode); stroke-width: 2 } .mark { color: var(--first); stroke-dasharray: 3 3 }
"""
_LEGEND = (("held", "held back"), ("first", "until the first token"), ("decode", "generating"), ("failed", "failed"))


def render(outcomes: Sequence[Outcome], figures: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """The SVG document."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    ttfts = sorted(outcome.ttft * 1000 for outcome in good)
    itls = sorted(gap * 1000 for outcome in good for gap in outcome.itls)
    parts = [
        *_heading(figures, facts),
        *_timeline(outcomes),
        *_distribution(_CURVES[0], "Time to first token (ms)", ttfts),
        *_distribution(_CURVES[1], "Inter-token latency (ms)", itls),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
            f"<title>{escape(_title(facts))}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="page" width="{_WIDTH}" height="{_HEIGHT}"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _title(facts: Mapping[str, Any]) -> str:
    rate = facts["request_rate"]
    pace = {"inf": "all at once", "trace": "at the trace's times"}.get(rate, f"{rate} a second")
    held = f", at most {facts['max_concurrency']} at a time" if facts["max_concurrency"] else ""
    return f"{facts['model_id']}: {facts['num_prompts']:,} requests, {pace}{held}"


def _heading(figures: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterable[str]:
    yield _text(_MARGIN, 44, _title(facts), "title")
    cells = [
        (f"{figures['request_throughput']:.2f}", "requests/s"),
        (f"{figures['output_throughput']:,.0f}", "output tokens/s"),
        (f"{figures['duration']:.1f}", "seconds"),
        (f"{figures['max_concurrent_requests']:,}", "at most at a time"),
        (f"{figures['failed']:,}", "failed"),
    ]
    spans = "\u2003".join(f'<tspan class="head">{value}</tspan> {unit}' for value, unit in cells)
    yield f'<text x="{_MARGIN}" y="74">{spans}</text>'


def _timeline(outcomes: Sequence[Outcome]) -> Iterable[str]:
    """A line per request, by arrival from top to bottom: held back, then waiting for its first token, then decoding."""
    x, y, width, height = _TIMELINE
    ordered = sorted(outcomes, key=lambda outcome: (outcome.arrival, outcome.start))
    zero = ordered[0].arrival if ordered else 0.0
    span = max((outcome.end - zero for outcome in ordered), default=0.0) or 1.0
    pitch = min(height / max(len(ordered), 1), 14.0)
    yield _text(x, y - 14, "Requests over time (s)", "head")
    yield from _axis(_TIMELINE, span, lambda value: f"{value:g}")
    segments: dict[str, list[str]] = {name: [] for name, _ in _LEGEND}

    def add(kind: str, row: int, start: float, end: float) -> None:
        if end > start:
            left, right = (x + width * (time - zero) / span for time in (start, end))
            segments[kind].append(f"M{left:.1f} {y + pitch * (row + 0.5):.2f}H{max(right, left + 0.5):.1f}")

    for row, outcome in enumerate(ordered):
        add("held", row, outcome.arrival, outcome.start)
        if outcome.error is not None:
            add("failed", row, outcome.start, outcome.end)
        else:
            add("first", row, outcome.start, outcome.token_times[0])
            add("decode", row, outcome.token_times[0], outcome.end)
    shown = [(name, label) for name, label in _LEGEND if segments[name]]
    spans = "\u2003".join(f'<tspan class="{name}">\u25a0</tspan> {label}' for name, label in shown)
    yield f'<text x="{x + width}" y="{y - 14}" text-anchor="end">{spans}</text>'
    for name, _ in shown:
        yield f'<path class="{name}" stroke-width="{pitch * 0.8:.2f}" d="{"".join(segments[name])}"/>'


def _distribution(box: tuple[int, int, int, int], label: str, ordered: Sequence[float]) -> Iterable[str]:
    """The share of the values up to x, for x up to the 99.5th percentile, with the median and p99 marked."""
    x, y, width, height = box
    yield _text(x, y - 38, label, "head")
    if not ordered:
        yield _text(x, y + 16, "No values.")
        return
    span = percentile(ordered, 99.5) * 1.04 or 1.0
    yield from _axis(box, span, lambda value: f"{value:g}")
    for share in (0, 50, 100):
        height_of_share = y + height * (1 - share / 100)
        yield f'<path class="grid" d="M{x} {height_of_share:.1f}h{width}"/>'
        yield _text(x - 6, height_of_share + 4, f"{share}%", "", "end")
    points: list[str] = []
    for step in range(201):
        share = step * 0.4975
        points.append(f"{x + width * percentile(ordered, share) / span:.1f} {y + height * (1 - share / 100):.1f}")
    yield f'<path class="curve" d="M{"L".join(points)}"/>'
    for share, name in ((50, "median"), (99, "p99")):
        value = percentile(ordered, share)
        shown = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        place = x + width * value / span
        anchor = "start" if share == 50 else "end"
        yield f'<path class="mark" d="M{place:.1f} {y}v{height}"/>'
        yield _text(min(place, x + width), y - 8 - 12 * (share == 50), f"{name} {shown}", "value", anchor)


def _axis(box: tuple[int, int, int, int], span: float, show: Any) -> Iterable[str]:
    """Vertical lines at round numbers from 0 to `span`, with the numbers below."""
    x, y, width, height = box
    step = _round_step(span / 6)
    for number in range(int(span / step) + 1):
        place = x + width * number * step / span
        yield f'<path class="grid" d="M{place:.1f} {y}v{height}"/>'
        yield _text(place, y + height + 18, show(round(number * step, 10)), "", "middle")


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... times a power of ten that is not below `least`."""
    power = 10.0 ** len(str(int(least))) / 10 if least >= 1 else 1.0
    while power > least:
        power /= 10
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


def _text(x: float, y: float, text: str, name: str = "", anchor: str = "start") -> str:
    kind = f' class="{name}"' if name else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind} text-anchor="{anchor}">{escape(text)}</text>'
