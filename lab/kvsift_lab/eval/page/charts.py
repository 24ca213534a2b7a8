"""Line charts: series with intervals, shifted where they coincide, and levels named at the edge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log2
from typing import Any, NamedTuple

from markupsafe import Markup

from kvsift_lab.eval.page.parts import rendered

NUM_COLOURS = 10  # of page.css
WIDTH, HEIGHT = 380, 250
LEFT, RIGHT, TOP, BOTTOM = 38, 48, 10, 40  # names of levels are at the right
SHIFT = 3.2  # pixels between marks of series at the same x
MARKS = (
    "M-3.4 0a3.4 3.4 0 1 0 6.8 0a3.4 3.4 0 1 0-6.8 0",
    "M-3-3h6v6h-6z",
    "M0-4L4 3H-4z",
    "M0-4.4L4.4 0L0 4.4L-4.4 0z",
)


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
        return f"var(--c{self.style % NUM_COLOURS})"

    @property
    def mark(self) -> str:
        return MARKS[self.style % len(MARKS)]

    @property
    def dash(self) -> str:
        return "2 3" if self.is_reference else ""


class Level(NamedTuple):
    """A horizontal level."""

    name: str
    y: float


def line_chart(
    title: str, x_title: str, y_title: str, series: Sequence[Series], levels: Sequence[Level] = (),
    logarithmic: bool = False,
) -> Markup:  # fmt: skip
    """Return an SVG with a y axis from 0 to 1; its description lists every number."""
    xs = [point.x for curve in series for point in curve.points] or [1.0]
    scale: Callable[[float], float] = log2 if logarithmic else float
    low, high = scale(min(xs)), scale(max(xs))
    margin = (high - low) * 0.08 or 0.5
    low, high = low - margin, high + margin

    def at_x(x: float) -> float:
        return LEFT + (scale(x) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def at_y(y: float) -> float:
        return round(TOP + (1 - y) * (HEIGHT - TOP - BOTTOM), 1)

    curves = []
    for index, curve in enumerate(series):
        shift = SHIFT * (index - (len(series) - 1) / 2)
        points: list[dict[str, Any]] = []
        for p in curve.points:
            x, y = round(at_x(p.x) + shift, 1), at_y(p.y)
            text = f"{p.y:.2f} ({p.low:.2f} to {p.high:.2f}) at {p.x:,.0f}"
            points.append({"x": x, "y": y, "place": f"{x},{y}", "low": at_y(p.low), "high": at_y(p.high), "text": text})
        curves.append((curve, points))
    numbers = [f"{curve.name}: {', '.join(point['text'] for point in points)}" for curve, points in curves]
    numbers += [f"{level.name}: {level.y:.2f}" for level in levels]
    return rendered(
        "line_chart.svg", width=WIDTH, height=HEIGHT, left=LEFT, right=WIDTH - RIGHT, bottom=HEIGHT - BOTTOM,
        title=title, x_title=x_title, y_title=y_title, numbers="; ".join(numbers), curves=curves,
        grid=[(at_y(y), f"{y:g}") for y in (0, 0.25, 0.5, 0.75, 1)],
        ticks=[(round(at_x(x), 1), f"{x:,.0f}") for x in _ticks(xs, logarithmic)],
        levels=_placed(levels, at_y),
    )  # fmt: skip


def _placed(levels: Sequence[Level], at_y: Callable[[float], float]) -> list[tuple[str, float, float]]:
    """Return names, heights of lines, and baselines of names that do not overlap."""
    placed, free = [], 0.0
    for level in sorted(levels, key=lambda level: -level.y):
        y = at_y(level.y)
        baseline = max(y + 4, free)
        free = baseline + 12
        placed.append((level.name, y, round(baseline, 1)))
    return placed


def _ticks(xs: Sequence[float], logarithmic: bool) -> list[float]:
    """Return at most seven round values between the smallest and the largest."""
    low, high = min(xs), max(xs)
    if logarithmic:
        powers = range(floor(log2(low) + 0.5), ceil(log2(high) - 0.5) + 1)
        step = -(-len(powers) // 7)
        return [2.0**power for power in powers][::step]
    step = max(1, -(-int(high - low + 1) // 7))
    return [float(x) for x in range(int(low), int(high) + 1, step)]


def legend(series: Sequence[Series]) -> Markup:
    """Return the names of series beside their lines, shared by several charts."""
    return rendered("legend.html", series=series)
