"""The figures of `quire bench spec`, and how they are drawn: the speed-up over the drafts, by text and batch.

Must not know how they are measured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quire.entrypoints.cli.svg import Box, curve, document, round_steps, text

_COLOURS = ["#3a7bd5", "#e8a33d", "#3aa76d", "#d23f57", "#8e5bd0", "#20a4b8", "#9a6a3a", "#d267b5", "#7d8a2e"]
_STYLE = ".even { stroke: CanvasText; opacity: 0.6; stroke-dasharray: 4 4 }"
_WIDTH, _HEIGHT = 260.0, 180.0  # of a panel


@dataclass(frozen=True)
class Figures:
    """One configuration's, of one text and batch; seconds are medians of the rounds, wall time."""

    name: str
    text: str
    num_speculative_tokens: int
    batch_size: int
    seconds_per_token: float  # of one sequence
    plain_seconds_per_token: float
    speedup: float  # median of the rounds' ratios, each of two runs one after the other
    cpu_speedup: float  # the same of CPU time, which a busy machine disturbs less
    num_drafted: int
    num_accepted: int
    tokens_per_step: float  # of a sequence
    break_even: float  # tokens that a step must yield to cost no more than plain decoding


def render(found: Sequence[Figures], model: str) -> str:
    """The SVG document."""
    names = list(dict.fromkeys(figures.name for figures in found))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    texts = list(dict.fromkeys(figures.text for figures in found))
    batches = list(dict.fromkeys(figures.batch_size for figures in found))
    highest = max([1.2, *(figures.speedup for figures in found)])
    parts: list[str] = []
    for column, shown in enumerate(texts):
        for row, batch in enumerate(batches):
            box = 56 + column * (_WIDTH + 60), 90 + row * (_HEIGHT + 80), _WIDTH, _HEIGHT
            chosen = [figures for figures in found if figures.text == shown and figures.batch_size == batch]
            parts += _panel(box, f"{shown}, batch {batch}", chosen, colours, highest)
    bottom = 90 + len(batches) * (_HEIGHT + 80)
    for place, name in enumerate(names):
        style = f'style="fill: {colours[name]}" font-weight="600"'
        parts.append(text(56 + 320 * (place % 3), bottom + 20 * (place // 3), name, "start", style))
    width = max(3, len(texts)) * (_WIDTH + 60) + 40
    title = f"{model}: times as fast as plain decoding, by drafts a step"
    return document(width, bottom + 20 * (len(names) // 3 + 1), title, _STYLE, parts)


def _panel(box: Box, title: str, found: Sequence[Figures], colours: dict[str, str], highest: float) -> Iterator[str]:
    x, y, width, height = box
    yield text(x, y - 14, title, "start", 'font-weight="600"')
    counts = sorted({figures.num_speculative_tokens for figures in found})
    places = {k: x + width * (i + 0.5) / len(counts) for i, k in enumerate(counts)}
    for k, place in places.items():
        yield text(place, y + height + 18, f"{k}", "middle")
    for number in round_steps(highest):
        level = y + height * (1 - number / highest)
        yield f'<path class="grid" d="M{x} {level:.1f}h{width}"/>'
        yield text(x - 6, level + 4, f"{number:g}", "end")
    yield f'<path class="even" d="M{x} {y + height * (1 - 1 / highest):.1f}h{width}"/>'
    for name, colour in colours.items():
        own = sorted((figures for figures in found if figures.name == name), key=lambda f: f.num_speculative_tokens)
        points = [(places[f.num_speculative_tokens], y + height * (1 - f.speedup / highest)) for f in own]
        style = f'style="stroke: {colour}"'
        if len(points) > 1:
            yield curve(points, "lined", style=style)
        for px, py in points:
            yield f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>'
