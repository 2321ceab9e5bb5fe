"""Pieces of a self-contained SVG that the benchmarks draw their figures with.

It follows the reader's light or dark colours. Must not know what is drawn.
"""

import math
from collections.abc import Iterator, Sequence
from html import escape

STYLE = """svg { color-scheme: light dark; background: Canvas; font: 12px system-ui, sans-serif }
text { fill: CanvasText } path { fill: none } .grid { stroke: CanvasText; opacity: 0.15 }
"""
Box = tuple[float, float, float, float]  # x, y, width, height


def document(width: float, height: float, title: str, style: str, parts: Sequence[str]) -> str:
    """The whole document; `style` is more CSS."""
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style>",
        text(56, 30, title, "start", 'font-size="15"'),
    ]
    return "\n".join([*head, *parts, "</svg>\n"])


def text(x: float, y: float, shown: str, anchor: str, style: str = "") -> str:
    """A line of text; `anchor` is start, middle or end."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {style}>{escape(shown)}</text>'


def round_steps(span: float) -> list[float]:
    """Round numbers from 0 to `span`, about six of them."""
    power = 10.0 ** math.floor(math.log10(span / 6))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= span / 6)
    return [number * step for number in range(int(span / step) + 1)]


def axis(box: Box, span: float, title: str) -> Iterator[str]:
    """The title above, and vertical lines at round numbers from 0 to `span` with the numbers below."""
    x, y, width, height = box
    yield text(x, y - 14, title, "start", 'font-weight="600"')
    for number in round_steps(span):
        place = x + width * number / span
        yield f'<path class="grid" d="M{place:.1f} {y}v{height}"/>'
        yield text(place, y + height + 18, f"{number:g}", "middle")


def curve(points: Sequence[tuple[float, float]], name: str, style: str = "") -> str:
    """A line through points, of the CSS class `name`."""
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path class="{name}" stroke-width="2" {style} d="M{path}"/>'
