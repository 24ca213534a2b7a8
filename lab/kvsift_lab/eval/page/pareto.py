"""Pareto chart: score against TPOT, with the plans that no other beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10
from typing import Any, NamedTuple

from markupsafe import Markup

from kvsift_lab.eval.page.charts import Series
from kvsift_lab.eval.page.costs import at_a_time
from kvsift_lab.eval.page.means import PlanMean, at_length, dense_of, is_unsolved, lengths_of
from kvsift_lab.eval.page.parts import Figure, Parts, percent, rendered
from kvsift_lab.eval.page.scores import lines_of

WIDTH, HEIGHT = 900, 400
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 14, 42
LETTER, LINE = 6.3, 13  # pixels of a label: width of a letter, height of its line
RING = 4.2

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


class ParetoPoint(NamedTuple):
    """A plan on the chart."""

    mean: PlanMean
    x: float
    y: float
    colour: str
    on_front: bool

    @property
    def place(self) -> str:
        return f"{self.x},{self.y}"

    @property
    def fill(self) -> str:
        """The colour of plans that decode with a CUDA graph; others are hollow."""
        return self.colour if self.mean.path == "captured" else "var(--panel)"

    @property
    def text(self) -> str:
        return f"{self.mean.label}: {self.mean.score or 0.0:.3f} at {_ms(self.mean):.2f} ms"


class ChartLabel(NamedTuple):
    """Text on the chart."""

    text: str
    kind: str
    x: float
    y: float


def render(result: dict[str, Any], means: Sequence[PlanMean]) -> Parts:
    """Return a chart per length, over all tasks; none where dense is not measurably better than chance."""
    timed = [mean for mean in means if mean.tpot_s and mean.tpot_s[1] and mean.score is not None]
    timed = [mean for mean in timed if not is_unsolved(result, mean.length)]
    if not timed:
        return []
    note = (
        "Mean score over all tasks; median TPOT of the evaluation. Filled marks decode with a CUDA graph, hollow ones "
        "eagerly, with the overhead of the host. Oracles need exact attention to select, so the front excludes them."
    )
    if any(mean.phase == "prefill" for mean in means):
        note += " Plans that limit only prefill decode densely: see the prefill of the contexts under Times."
    lines = lines_of(result)
    charts = [_figure(at_length(timed, length), length, lines) for length in lengths_of(timed)]
    return [f"{note} {at_a_time(result)}", *charts]


def front_of(means: Sequence[PlanMean]) -> list[PlanMean]:
    """Return the plans, dense included, that score higher than all faster ones, the fastest first."""
    front: list[PlanMean] = []
    runs = [mean for mean in means if mean.is_dense or mean.role != "ceiling"]
    for mean in sorted(runs, key=lambda run: (_ms(run), -(run.score or 0.0))):
        if not front or (mean.score or 0.0) > (front[-1].score or 0.0):
            front.append(mean)
    return front


def _ms(mean: PlanMean) -> float:
    assert mean.tpot_s is not None
    return 1e3 * mean.tpot_s[1]


def _figure(means: Sequence[PlanMean], length: int | None, lines: dict[str, Series]) -> Figure:
    front, dense = front_of(means), dense_of(means, length)
    listed = ", ".join(f"{mean.label} ({_ms(mean):.2f} ms, {mean.score:.3f})" for mean in front)
    text = f"Pareto front: {listed}."
    faster = [mean for mean in front if dense and _ms(mean) < _ms(dense)]
    best = max(faster, key=lambda mean: mean.score or 0.0, default=None)
    if best and dense and best.phase == "decode":
        text += f" {best.label} takes {percent(_ms(best), _ms(dense))} of dense's time."
    elif dense and not best:
        text += " No plan is faster than dense here."
    where = f"{length:,} tokens" if length else "Files"
    chart, numbered = _chart(means, front, lines, where)
    box = Markup('<div class=scroll tabindex=0 role=region aria-label="Chart of {}">{}</div>').format(where, chart)
    return Figure(f"{where}: score against TPOT", [box, *(["; ".join(numbered)] if numbered else []), text])


def _chart(
    means: Sequence[PlanMean], front: Sequence[PlanMean], lines: dict[str, Series], where: str
) -> tuple[Markup, list[str]]:
    """Return the SVG and the legend of its numbers."""
    times, scores = [_ms(mean) for mean in means], [mean.score or 0.0 for mean in means]
    step = 0.05 if max(scores) - min(scores) < 0.25 else 0.2
    bottom = floor(min(scores) / step) * step
    top = max(scores) + 0.08 * (max(scores) - bottom or 1.0)  # room for labels
    left, right = log10(min(times)) - 0.03, log10(max(times)) + 0.12

    def at_x(ms: float) -> float:
        return round(LEFT + (log10(ms) - left) / (right - left) * (WIDTH - LEFT - RIGHT), 1)

    def at_y(score: float) -> float:
        return round(HEIGHT - BOTTOM - (score - bottom) / (top - bottom) * (HEIGHT - TOP - BOTTOM), 1)

    def spot(mean: PlanMean) -> ParetoPoint:
        colour = "var(--ink)" if mean.is_dense else lines[mean.name].colour
        return ParetoPoint(mean, at_x(_ms(mean)), at_y(mean.score or 0.0), colour, mean in front)

    spots, on_front = [spot(mean) for mean in means], [spot(mean) for mean in front]
    labels, numbered = _labels(spots, on_front)
    values = [bottom + index * step for index in range(int((min(top, 1.0) - bottom) / step + 0.01) + 1)]
    chart = rendered(
        "pareto_chart.svg", width=WIDTH, height=HEIGHT, left=LEFT, right=WIDTH - RIGHT, bottom=HEIGHT - BOTTOM,
        where=where, numbers="; ".join(spot.text for spot in spots), ring=RING, spots=spots, labels=labels,
        grid=[(at_y(value), f"{value:.2f}") for value in values],
        ticks=[(at_x(ms), f"{ms:g}") for ms in _ticks(min(times), max(times))],
        lines=_budget_lines(spots), front=_steps(on_front),
    )  # fmt: skip
    return chart, numbered


def _ticks(low: float, high: float) -> list[float]:
    """Return 1, 2, 3, 5, 7 times powers of ten; every half if these are too few."""
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    for digits in ((10, 20, 30, 50, 70), range(10, 100, 5)):
        ticks = [each for p in powers for k in digits if low <= (each := k * 10.0 ** (p - 1)) <= high * 1.1]
        if len(ticks) > 2:
            break
    return ticks


def _budget_lines(spots: Sequence[ParetoPoint]) -> list[list[ParetoPoint]]:
    """Return the points of each plan in the order of their budgets."""
    names = dict.fromkeys(spot.mean.name for spot in spots)
    return [
        sorted((spot for spot in spots if spot.mean.name == name), key=lambda spot: spot.mean.budget or 0)
        for name in names
    ]


def _steps(front: Sequence[ParetoPoint]) -> list[str]:
    """Return the front as a staircase, with no plan above and left of it."""
    steps = [f"{front[0].x},{HEIGHT - BOTTOM}"]
    for spot, after in zip(front, [*front[1:], None]):
        steps += [spot.place, f"{after.x if after else WIDTH - RIGHT},{spot.y}"]
    return steps


def _labels(spots: Sequence[ParetoPoint], on_front: Sequence[ParetoPoint]) -> tuple[list[ChartLabel], list[str]]:
    """Return labels of the front and of each plan at its best budget; labels without room are numbers in the legend."""
    best: dict[str, ParetoPoint] = {}
    for spot in spots:
        if spot.mean.name not in best or (spot.mean.score or 0.0) > (best[spot.mean.name].mean.score or 0.0):
            best[spot.mean.name] = spot
    occupied = [(spot.x - RING, spot.y - RING, spot.x + RING, spot.y + RING) for spot in spots]
    ends = [spot.x for spot in on_front[1:]] + [WIDTH - RIGHT]
    occupied += [(spot.x, spot.y - 1, end, spot.y + 1) for spot, end in zip(on_front, ends, strict=True)]  # the front
    labels: list[ChartLabel] = []
    numbered: list[str] = []
    for spot in [*on_front, *(spot for spot in best.values() if not spot.on_front)]:
        label = _label(spot, spot.mean.label, occupied)
        if label is None:
            numbered.append(f"{len(numbered) + 1} {spot.mean.label}")
            label = _label(spot, str(len(numbered)), occupied, always=True)
        assert label is not None
        labels.append(label)
    return labels, numbered


def _label(spot: ParetoPoint, text: str, occupied: list[Box], always: bool = False) -> ChartLabel | None:
    """Return text at the first free position beside a point; without one, None unless ``always``."""
    width, gap = LETTER * len(text) * (1.15 if spot.on_front else 1), RING + 6
    sides = spot.x + gap, spot.x - gap - width
    beside = [(x, spot.y - LINE / 2 + shift) for shift in (0, -LINE, LINE) for x in sides]
    corners = [*beside, (spot.x - width / 2, spot.y - gap - LINE), (spot.x - width / 2, spot.y + gap)]
    boxes = [(left, top, left + width, top + LINE) for left, top in corners]
    box = next((box for box in boxes if _fits(box, occupied)), boxes[0] if always else None)
    if box is None:
        return None
    occupied.append(box)
    return ChartLabel(text, "name onfront" if spot.on_front else "name", round(box[0], 1), round(box[1] + 10, 1))


def _fits(box: Box, occupied: Sequence[Box]) -> bool:
    left, top, right, bottom = box
    inside = left > LEFT and right < WIDTH - 2 and top > 0 and bottom < HEIGHT - BOTTOM
    return inside and all(right < a or left > c or bottom < b or top > d for a, b, c, d in occupied)
