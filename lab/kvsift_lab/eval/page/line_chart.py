"""Line charts as SVG: series with intervals, shifted where they coincide, and levels named at the edge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log2
from typing import NamedTuple

from kvsift_lab.eval.page.html import escaped
from kvsift_lab.eval.page.style import COLOURS

WIDTH, HEIGHT = 380, 250
LEFT, RIGHT, TOP, BOTTOM = 38, 48, 10, 40  # names of levels are at the right
SHIFT = 3.2  # pixels between marks of series at the same x
DASH_OF_REFERENCES = "2 3"
MARKS = (
    "M-3.4 0a3.4 3.4 0 1 0 6.8 0a3.4 3.4 0 1 0-6.8 0",
    "M-3-3h6v6h-6z",
    "M0-4L4 3H-4z",
    "M0-4.4L4.4 0L0 4.4L-4.4 0z",
)

Scale = Callable[[float], float]


class ChartPoint(NamedTuple):
    """One value with its interval, which is the value itself if there is none."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Series:
    """A line. ``style`` is an index of colour and mark; lines of references are dotted."""

    name: str
    points: Sequence[ChartPoint]
    style: int
    is_reference: bool = False

    @property
    def colour(self) -> str:
        return f"var(--c{self.style % len(COLOURS)})"

    @property
    def dash(self) -> str:
        return DASH_OF_REFERENCES if self.is_reference else ""

    def mark(self, x: float, y: float) -> str:
        """Return the mark of a point."""
        shape = MARKS[self.style % len(MARKS)]
        return f'<path class="mark" transform="translate({x:.1f} {y:.1f})" d="{shape}" fill="{self.colour}"/>'


class Level(NamedTuple):
    """A horizontal level."""

    name: str
    y: float


def line_chart(
    title: str, x_title: str, y_title: str, series: Sequence[Series], levels: Sequence[Level] = (),
    logarithmic: bool = False,
) -> str:  # fmt: skip
    """Return an SVG with a y axis from 0 to 1; its description lists every number."""
    xs = [point.x for curve in series for point in curve.points] or [1.0]
    scale = log2 if logarithmic else float
    low, high = scale(min(xs)), scale(max(xs))
    margin = (high - low) * 0.08 or 0.5
    low, high = low - margin, high + margin

    def at_x(x: float) -> float:
        return LEFT + (scale(x) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def at_y(y: float) -> float:
        return TOP + (1 - y) * (HEIGHT - TOP - BOTTOM)

    parts = [_frame(x_title, y_title, at_y)]
    parts += [_tick(at_x(x), f"{x:,.0f}") for x in _ticks(xs, logarithmic)]
    parts += _levels(levels, at_y)
    for index, curve in enumerate(series):
        shift = SHIFT * (index - (len(series) - 1) / 2)
        parts.append(_series(curve, lambda x, shift=shift: at_x(x) + shift, at_y))  # type: ignore[misc]
    numbers = "; ".join(
        f"{curve.name}: " + ", ".join(f"{p.y:.2f} at {p.x:,.0f} ({p.low:.2f} to {p.high:.2f})" for p in curve.points)
        for curve in series
    )
    numbers += "".join(f"; {level.name}: {level.y:.2f}" for level in levels)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{escaped(title)}</title><desc>{escaped(numbers)}</desc>'
        + "".join(parts)
        + "</svg>"
    )


def legend(series: Sequence[Series]) -> str:
    """Return the names of series beside their lines, shared by several charts."""
    listed = "".join(
        f'<li><svg viewBox="0 0 34 12" aria-hidden="true"><line x1="1" x2="33" y1="6" y2="6" stroke="{curve.colour}" '
        f'stroke-width="2" stroke-dasharray="{curve.dash}"/>{curve.mark(17, 6)}</svg>{escaped(curve.name)}</li>'
        for curve in series
    )
    return f"<ul class=legend>{listed}</ul>"


def _frame(x_title: str, y_title: str, at_y: Scale) -> str:
    lines = "".join(
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at_y(y):.1f}" y2="{at_y(y):.1f}"/>'
        f'<text x="{LEFT - 5}" y="{at_y(y) + 4:.1f}" text-anchor="end">{y:g}</text>'
        for y in (0, 0.25, 0.5, 0.75, 1)
    )
    middle = (LEFT + WIDTH - RIGHT) / 2
    return (
        f'{lines}<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escaped(x_title)}</text>'
        f'<text transform="translate(10 {HEIGHT / 2 - 16:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escaped(y_title)}</text>"
    )


def _levels(levels: Sequence[Level], at_y: Scale) -> list[str]:
    """Return horizontal lines with names at their right ends that do not overlap."""
    parts, free = [], 0.0
    for level in sorted(levels, key=lambda level: -level.y):
        y = at_y(level.y)
        baseline = max(y + 4, free)
        free = baseline + 12
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--soft)" '
            f'stroke-dasharray="{DASH_OF_REFERENCES}"/><text class="level" x="{WIDTH - RIGHT + 5}" '
            f'y="{baseline:.1f}">{escaped(level.name)}</text>'
        )
    return parts


def _tick(x: float, text: str) -> str:
    y = HEIGHT - BOTTOM
    return (
        f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 4}"/>'
        f'<text x="{x:.1f}" y="{y + 16}" text-anchor="middle">{text}</text>'
    )


def _series(curve: Series, at_x: Scale, at_y: Scale) -> str:
    path = " ".join(f"{at_x(p.x):.1f},{at_y(p.y):.1f}" for p in sorted(curve.points))
    line = (f'<polyline points="{path}" fill="none" stroke="{curve.colour}" stroke-width="2" '
            f'stroke-dasharray="{curve.dash}"/>')  # fmt: skip
    marks = "".join(
        f"<g><title>{escaped(curve.name)}: {p.y:.2f} ({p.low:.2f} to {p.high:.2f}) at {p.x:,.0f}</title>"
        f'<line class="interval" x1="{at_x(p.x):.1f}" x2="{at_x(p.x):.1f}" y1="{at_y(p.low):.1f}" '
        f'y2="{at_y(p.high):.1f}" stroke="{curve.colour}" stroke-opacity=".5" stroke-width="1.5"/>'
        f"{curve.mark(at_x(p.x), at_y(p.y))}</g>"
        for p in curve.points
    )
    return line + marks


def _ticks(xs: Sequence[float], logarithmic: bool) -> list[float]:
    """Return at most seven round values between the smallest and the largest."""
    low, high = min(xs), max(xs)
    if logarithmic:
        powers = range(floor(log2(low) + 0.5), ceil(log2(high) - 0.5) + 1)
        step = -(-len(powers) // 7)
        return [2.0**power for power in powers][::step]
    step = max(1, -(-int(high - low + 1) // 7))
    return [float(x) for x in range(int(low), int(high) + 1, step)]
