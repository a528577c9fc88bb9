"""HTML of tables, bars and line plots for `_repr_html_`, which notebooks show: no scripts, and all texts escaped."""

import html
import math
from collections.abc import Iterable, Sequence

from broker.domain.formatting import visible

WIDTH, HEIGHT = 640, 150
LEFT, RIGHT, TOP, BOTTOM = 60, 10, 20, 20
"""Pixels around the line of a plot, for its labels."""


def text_html(text: str) -> str:
    """Return a text of a user or host, without control characters."""
    return html.escape(visible(text))


def table_html(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of texts."""
    lines = ["".join(f"<td>{text_html(cell)}</td>" for cell in row) for row in rows]
    names = "".join(f"<th>{text_html(name)}</th>" for name in head)
    return f"<table><tr>{names}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def bar_html(share: float) -> str:
    """Return a progress bar. `share`: the finished part, from 0 to 1."""
    return f'<progress max="1" value="{min(1.0, max(0.0, share)):.3f}" style="width: {WIDTH}px"></progress>'


def plot_svg(title: str, points: Iterable[tuple[int, float | None]], marks: Iterable[tuple[int, str]] = ()) -> str:
    """Return a line over steps, with a dashed line at each mark; empty for fewer than two points."""
    finite = [(step, value) for step, value in points if value is not None and math.isfinite(value)]
    if len(finite) < 2:
        return ""
    (first, _), (last, _) = finite[0], finite[-1]
    low, high = min(value for _, value in finite), max(value for _, value in finite)

    def x(step: int) -> float:
        return LEFT + (step - first) / max(1, last - first) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:  # halves, because the difference of two finite numbers may be infinite
        share = (value / 2 - low / 2) / (high / 2 - low / 2) if high / 2 > low / 2 else 0.5
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in finite)
    parts = [
        f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="1.5"/>',
        _label(LEFT, TOP - 6, title),
        _label(0, TOP + 4, f"{high:.4g}"),
        _label(0, HEIGHT - BOTTOM, f"{low:.4g}"),
        _label(LEFT, HEIGHT - 4, f"step {first}"),
        _label(WIDTH - RIGHT, HEIGHT - 4, f"{last}", end=True),
    ]
    for step, name in marks:
        if first <= step <= last:
            place = f'x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"'
            parts.append(f'<line {place} stroke="gray" stroke-dasharray="4"/>')
            parts.append(_label(x(step), TOP - 6, name))
    return f'<svg width="{WIDTH}" height="{HEIGHT}" font-size="11" role="img">{"".join(parts)}</svg>'


def _label(x: float, y: float, text: str, *, end: bool = False) -> str:
    anchor = ' text-anchor="end"' if end else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="currentColor"{anchor}>{text_html(text)}</text>'
