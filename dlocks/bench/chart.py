"""Bar charts as SVG, by string formatting alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

BAR, GAP, HEAD, LABELS, VALUES, WIDTH, MARGIN = 16, 6, 44, 130, 70, 460, 20
COLORS = (
    "#2f6db3",
    "#2a9d8f",
    "#7a5195",
    "#d1495b",
    "#edae49",
    "#5b8e3e",
    "#9a6b4b",
    "#5f6b7a",
)


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart with one bar per label, in order. A value of None has no bar."""

    title: str
    note: str
    bars: Sequence[tuple[str, float | None]]


def draw(title: str, note: str, charts: Sequence[Chart], columns: int = 2) -> str:
    """Return the charts as SVG, with ``columns`` of them side by side."""
    rows = [charts[first : first + columns] for first in range(0, len(charts), columns)]
    body, y = [], 64
    for row in rows:
        for column, chart in enumerate(row):
            body.append(_chart(chart, MARGIN + column * (WIDTH + MARGIN), y))
        y += max(_height(chart) for chart in row) + MARGIN
    width, height = MARGIN + columns * (WIDTH + MARGIN), y + 4
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join(
        [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"'
                ' font-family="sans-serif" font-size="12">'
            ),
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            _text(MARGIN, 28, title, 'font-size="17" font-weight="600"'),
            _text(MARGIN, 48, note, 'fill="#5f6b7a"'),
            *body,
            "</svg>\n",
        ]
    )


def _height(chart: Chart) -> int:
    return HEAD + len(chart.bars) * (BAR + GAP)


def _chart(chart: Chart, x: int, y: int) -> str:
    room = WIDTH - LABELS - VALUES
    most = max((value for _, value in chart.bars if value is not None), default=0) or 1
    parts = [
        _text(x, y + 14, chart.title, 'font-weight="600"'),
        _text(x, y + 30, chart.note, 'fill="#5f6b7a" font-size="11"'),
    ]
    for number, (label, value) in enumerate(chart.bars):
        top = y + HEAD + number * (BAR + GAP)
        shown = label if len(label) <= 20 else f"{label[:19]}…"
        parts.append(_text(x + LABELS - 8, top + 12, shown, 'text-anchor="end"'))
        length = 0 if value is None else max(1.0, room * value / most)
        color = COLORS[number % len(COLORS)]
        parts.append(
            f'<rect x="{x + LABELS}" y="{top}" width="{length:.1f}" height="{BAR}"'
            f' rx="2" fill="{color}"/>'
        )
        parts.append(
            _text(
                x + LABELS + length + 6,
                top + 12,
                "–" if value is None else number_of(value),
            )
        )
    return "\n".join(parts)


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'


def number_of(value: float) -> str:
    """Return a figure with about three significant digits."""
    return (
        f"{value:,.0f}"
        if value >= 100
        else f"{value:.1f}"
        if value >= 10
        else f"{value:.2f}"
    )
