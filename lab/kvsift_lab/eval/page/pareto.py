"""Pareto chart: score against TPOT, with the plans that no other beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10
from typing import Any, NamedTuple

from kvsift_lab.eval.page.html import escaped, figure, percent
from kvsift_lab.eval.page.line_chart import Series
from kvsift_lab.eval.page.means import PlanMean, dense_of, is_unsolved
from kvsift_lab.eval.page.quality import lines_of
from kvsift_lab.eval.page.speed import at_a_time

WIDTH, HEIGHT = 900, 400
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 14, 42
LETTER, LINE = 6.3, 13  # pixels of a label: width of a letter, height of its line
RING = 4.2

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


class ParetoPoint(NamedTuple):
    """A plan on the chart."""

    mean: PlanMean
    ms: float
    score: float
    x: float
    y: float


def render(result: dict[str, Any], means: Sequence[PlanMean]) -> str:
    """Return a chart per length, over all tasks; none where dense is not measurably better than chance."""
    timed = [mean for mean in means if mean.tpot_s and mean.tpot_s[1] and mean.score is not None]
    timed = [mean for mean in timed if not is_unsolved(result, mean.length)]
    lengths = list(dict.fromkeys(mean.length for mean in timed))
    lines = lines_of(result)
    charts = [_figure([mean for mean in timed if mean.length == length], length, lines) for length in lengths]
    if not charts:
        return ""
    note = (
        "Mean score over all tasks; median TPOT of the evaluation. Filled marks decode with a CUDA graph, hollow ones "
        "eagerly, with the overhead of the host. Oracles need exact attention to select, so the front excludes them."
    )
    if any(mean.phase == "prefill" for mean in means):
        note += " Plans that limit only prefill decode densely: see the prefill of the contexts under Times."
    return f"<p class=soft>{note} {at_a_time(result)}</p>" + "".join(charts)


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


def _figure(means: Sequence[PlanMean], length: int | None, lines: dict[str, Series]) -> str:
    front = front_of(means)
    dense = dense_of(means, length)
    listed = ", ".join(f"{mean.label} ({_ms(mean):.2f} ms, {mean.score:.3f})" for mean in front)
    where = f"{length:,} tokens" if length else "Files"
    faster = [mean for mean in front if dense and _ms(mean) < _ms(dense)]
    best = max(faster, key=lambda mean: mean.score or 0.0, default=None)
    text = f"Pareto front: {listed}."
    if best and dense and best.phase == "decode":
        text += f" {best.label} takes {percent(_ms(best), _ms(dense))} of dense's time."
    elif dense and not best:
        text += " No plan is faster than dense here."
    chart, numbered = _chart(means, front, lines, where)
    key = f"<p class=soft>{escaped('; '.join(numbered))}</p>" if numbered else ""
    drawing = f'<div class=scroll tabindex=0 role=region aria-label="Chart of {where}">{chart}</div>'
    return figure(f"{where}: score against TPOT", f"{drawing}{key}<p class=soft>{escaped(text)}</p>")


def _chart(
    means: Sequence[PlanMean], front: Sequence[PlanMean], lines: dict[str, Series], where: str
) -> tuple[str, list[str]]:
    """Return the SVG and the legend of its numbers."""
    spots, axes = _spots(means)
    on_front = [spot for mean in front for spot in spots if spot.mean is mean]
    described = "; ".join(f"{spot.mean.label}: {spot.score:.3f} at {spot.ms:.2f} ms" for spot in spots)
    parts = [axes, _budget_lines(spots, lines), _front(on_front)]
    parts += [_mark(spot, lines, spot in on_front) for spot in spots]
    names, numbered = _labels(spots, on_front)
    drawing = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>Score against time per token, {escaped(where)}</title>'
        f"<desc>{escaped(described)}</desc>{''.join(parts + names)}</svg>"
    )
    return drawing, numbered


def _spots(means: Sequence[PlanMean]) -> tuple[list[ParetoPoint], str]:
    """Return the points of the plans, and the axes."""
    times, scores = [_ms(mean) for mean in means], [mean.score or 0.0 for mean in means]
    step = 0.05 if max(scores) - min(scores) < 0.25 else 0.2
    bottom = floor(min(scores) / step) * step
    top = max(scores) + 0.08 * (max(scores) - bottom or 1.0)  # room for labels
    left, right = log10(min(times)) - 0.03, log10(max(times)) + 0.12

    def at_x(ms: float) -> float:
        return LEFT + (log10(ms) - left) / (right - left) * (WIDTH - LEFT - RIGHT)

    def at_y(score: float) -> float:
        return HEIGHT - BOTTOM - (score - bottom) / (top - bottom) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for index in range(int((min(top, 1.0) - bottom) / step + 0.01) + 1):
        value = bottom + index * step
        y = at_y(value)
        parts.append(
            f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>'
        )
    for ms in _ticks(min(times), max(times)):
        x = at_x(ms)
        parts.append(
            f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM + 4}"/>'
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{ms:g}</text>'
        )
    parts.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">TPOT, ms (logarithmic; left is faster)</text>'
        f'<text transform="translate(11 {HEIGHT / 2 - 14:.0f}) rotate(-90)" text-anchor="middle">mean score</text>'
    )
    spots = [ParetoPoint(mean, ms, y, at_x(ms), at_y(y)) for mean, ms, y in zip(means, times, scores, strict=True)]
    return spots, "".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    """Return 1, 2, 3, 5, 7 times powers of ten; every half if these are too few."""
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    for digits in ((10, 20, 30, 50, 70), range(10, 100, 5)):
        ticks = [each for p in powers for k in digits if low <= (each := k * 10.0 ** (p - 1)) <= high * 1.1]
        if len(ticks) > 2:
            break
    return ticks


def _colour(mean: PlanMean, lines: dict[str, Series]) -> str:
    return "var(--ink)" if mean.is_dense else lines[mean.name].colour


def _budget_lines(spots: Sequence[ParetoPoint], lines: dict[str, Series]) -> str:
    """Return lines through the budgets of each plan."""
    parts = []
    for name in dict.fromkeys(spot.mean.name for spot in spots):
        own = sorted((spot for spot in spots if spot.mean.name == name), key=lambda spot: spot.mean.budget or 0)
        path = " ".join(f"{spot.x:.1f},{spot.y:.1f}" for spot in own)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{_colour(own[0].mean, lines)}" stroke-opacity=".3"/>'
        )
    return "".join(parts)


def _front(spots: Sequence[ParetoPoint]) -> str:
    """Return the front as a staircase, with no plan above and left of it."""
    steps = [f"{spots[0].x:.1f},{HEIGHT - BOTTOM}"]
    for spot, after in zip(spots, [*spots[1:], None]):
        steps += [f"{spot.x:.1f},{spot.y:.1f}", f"{after.x if after else WIDTH - RIGHT:.1f},{spot.y:.1f}"]
    return (
        f'<polyline class="front" points="{" ".join(steps)}" fill="none" stroke="var(--ink)" stroke-width="1.2" '
        'stroke-dasharray="5 3"/>'
    )


def _mark(spot: ParetoPoint, lines: dict[str, Series], on_front: bool) -> str:
    colour = _colour(spot.mean, lines)
    fill = colour if spot.mean.path == "captured" else "var(--panel)"
    ring = f'<circle cx="{spot.x:.1f}" cy="{spot.y:.1f}" r="{RING + 3}" fill="none" stroke="var(--ink)"/>'
    return (
        f"<g><title>{escaped(spot.mean.label)}: {spot.score:.3f} at {spot.ms:.2f} ms</title>"
        f'<circle class="mark" cx="{spot.x:.1f}" cy="{spot.y:.1f}" r="{RING}" fill="{fill}" stroke="{colour}" '
        f'stroke-width="1.6"/>{ring if on_front else ""}</g>'
    )


def _labels(spots: Sequence[ParetoPoint], on_front: Sequence[ParetoPoint]) -> tuple[list[str], list[str]]:
    """Return labels of the front and of each plan at its best budget; labels without room are numbers in the legend."""
    best: dict[str, ParetoPoint] = {}
    for spot in spots:
        if spot.mean.name not in best or spot.score > best[spot.mean.name].score:
            best[spot.mean.name] = spot
    occupied = [(spot.x - RING, spot.y - RING, spot.x + RING, spot.y + RING) for spot in spots]
    ends = [spot.x for spot in on_front[1:]] + [WIDTH - RIGHT]
    occupied += [(spot.x, spot.y - 1, end, spot.y + 1) for spot, end in zip(on_front, ends, strict=True)]  # the front
    parts: list[str] = []
    numbered: list[str] = []
    for spot in [*on_front, *(spot for spot in best.values() if spot not in on_front)]:
        kind = "name onfront" if spot in on_front else "name"
        if not (drawn := _label(spot, spot.mean.label, kind, occupied)):
            numbered.append(f"{len(numbered) + 1} {spot.mean.label}")
            drawn = _label(spot, str(len(numbered)), kind, occupied, always=True)
        parts.append(drawn)
    return parts, numbered


def _label(spot: ParetoPoint, text: str, kind: str, occupied: list[Box], always: bool = False) -> str:
    """Return text at the first free position beside a point; without one, empty unless ``always``."""
    width, gap = LETTER * len(text) * (1.15 if "onfront" in kind else 1), RING + 6
    sides = spot.x + gap, spot.x - gap - width
    beside = [(x, spot.y - LINE / 2 + shift) for shift in (0, -LINE, LINE) for x in sides]
    corners = [*beside, (spot.x - width / 2, spot.y - gap - LINE), (spot.x - width / 2, spot.y + gap)]
    boxes = [(left, top, left + width, top + LINE) for left, top in corners]
    box = next((box for box in boxes if _fits(box, occupied)), boxes[0] if always else None)
    if box is None:
        return ""
    occupied.append(box)
    return f'<text class="{kind}" x="{box[0]:.1f}" y="{box[1] + 10:.1f}">{escaped(text)}</text>'


def _fits(box: Box, occupied: Sequence[Box]) -> bool:
    left, top, right, bottom = box
    inside = left > LEFT and right < WIDTH - 2 and top > 0 and bottom < HEIGHT - BOTTOM
    return inside and all(right < a or left > c or bottom < b or top > d for a, b, c, d in occupied)
