"""The score against the time per output token, and the plans that no other beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10
from typing import Any, NamedTuple

from kvsift.eval.page.html import escaped, figure, percent
from kvsift.eval.page.lines import Series
from kvsift.eval.page.means import Mean, dense_of
from kvsift.eval.page.quality import lines_of
from kvsift.eval.page.speed import at_a_time

WIDTH, HEIGHT = 900, 400
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 14, 42
LETTER, LINE = 6.3, 13  # pixels of a label: width of a letter, height of its line
RING = 4.2

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


class Spot(NamedTuple):
    """A plan on the chart."""

    mean: Mean
    ms: float
    score: float
    x: float
    y: float


def render(result: dict[str, Any], means: Sequence[Mean]) -> str:
    """A chart per length, over all tasks."""
    timed = [each for each in means if each.tpot_s and each.tpot_s[1] and each.score is not None]
    lengths = list(dict.fromkeys(each.length for each in timed))
    lines = lines_of(result)
    charts = [_figure([each for each in timed if each.length == length], length, lines) for length in lengths]
    if not charts:
        return ""
    note = (
        "Mean score over all tasks; median TPOT as met while asking. Filled marks decode with a CUDA graph, hollow "
        "ones run eagerly and pay for the host. Oracles need exact attention to choose, so the front leaves them out."
    )
    if any(each.phase == "prefill" for each in means):
        note += " Plans that limit only prefill decode as dense does: see the prefill of the contexts under Times."
    return f"<p class=soft>{note} {at_a_time(result)}</p>" + "".join(charts)


def front_of(means: Sequence[Mean]) -> list[Mean]:
    """The plans, dense among them, that score higher than all that are as fast, from the fastest on."""
    front: list[Mean] = []
    runs = [each for each in means if each.is_dense or each.role != "ceiling"]
    for each in sorted(runs, key=lambda each: (_ms(each), -(each.score or 0.0))):
        if not front or (each.score or 0.0) > (front[-1].score or 0.0):
            front.append(each)
    return front


def _ms(mean: Mean) -> float:
    assert mean.tpot_s is not None
    return 1e3 * mean.tpot_s[1]


def _figure(means: Sequence[Mean], length: int | None, lines: dict[str, Series]) -> str:
    front = front_of(means)
    dense = dense_of(means, length)
    listed = ", ".join(f"{each.label} ({_ms(each):.2f} ms, {each.score:.3f})" for each in front)
    where = f"{length:,} tokens" if length else "Files"
    faster = [each for each in front if dense and _ms(each) < _ms(dense)]
    best = max(faster, key=lambda each: each.score or 0.0, default=None)
    said = f"Pareto front: {listed}."
    if best and dense and best.phase == "decode":
        said += f" {best.label} takes {percent(_ms(best), _ms(dense))} of dense's time."
    elif dense and not best:
        said += " No plan is faster than dense here."
    chart, numbered = _chart(means, front, lines, where)
    key = f"<p class=soft>{escaped('; '.join(numbered))}</p>" if numbered else ""
    drawing = f'<div class=scroll tabindex=0 role=region aria-label="Chart of {where}">{chart}</div>'
    return figure(f"{where}: score against TPOT", f"{drawing}{key}<p class=soft>{escaped(said)}</p>")


def _chart(means: Sequence[Mean], front: Sequence[Mean], lines: dict[str, Series], where: str) -> tuple[str, list[str]]:
    """The SVG, and what its numbers mean."""
    spots, axes = _placed(means)
    on_front = [spot for each in front for spot in spots if spot.mean is each]
    described = "; ".join(f"{spot.mean.label}: {spot.score:.3f} at {spot.ms:.2f} ms" for spot in spots)
    parts = [axes, _threads(spots, lines), _front(on_front)]
    parts += [_mark(spot, lines, spot in on_front) for spot in spots]
    names, numbered = _labels(spots, on_front)
    drawing = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>Score against time per token, {escaped(where)}</title>'
        f"<desc>{escaped(described)}</desc>{''.join(parts + names)}</svg>"
    )
    return drawing, numbered


def _placed(means: Sequence[Mean]) -> tuple[list[Spot], str]:
    """Where every plan stands, and the axes."""
    times, scores = [_ms(each) for each in means], [each.score or 0.0 for each in means]
    step = 0.05 if max(scores) - min(scores) < 0.25 else 0.2
    bottom = floor(min(scores) / step) * step
    top = max(scores) + 0.08 * (max(scores) - bottom or 1.0)  # room for names above
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
    spots = [Spot(each, ms, y, at_x(ms), at_y(y)) for each, ms, y in zip(means, times, scores, strict=True)]
    return spots, "".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    """1, 2, 3, 5, 7 times powers of ten; every half where those are too few."""
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    for digits in ((10, 20, 30, 50, 70), range(10, 100, 5)):
        ticks = [each for p in powers for k in digits if low <= (each := k * 10.0 ** (p - 1)) <= high * 1.1]
        if len(ticks) > 2:
            break
    return ticks


def _colour(mean: Mean, lines: dict[str, Series]) -> str:
    return "var(--ink)" if mean.is_dense else lines[mean.name].colour


def _threads(spots: Sequence[Spot], lines: dict[str, Series]) -> str:
    """Budgets of one plan, joined."""
    parts = []
    for name in dict.fromkeys(spot.mean.name for spot in spots):
        own = sorted((spot for spot in spots if spot.mean.name == name), key=lambda spot: spot.mean.budget or 0)
        path = " ".join(f"{spot.x:.1f},{spot.y:.1f}" for spot in own)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{_colour(own[0].mean, lines)}" stroke-opacity=".3"/>'
        )
    return "".join(parts)


def _front(spots: Sequence[Spot]) -> str:
    """A staircase: what is above and left of it, no plan reaches."""
    steps = [f"{spots[0].x:.1f},{HEIGHT - BOTTOM}"]
    for spot, after in zip(spots, [*spots[1:], None]):
        steps += [f"{spot.x:.1f},{spot.y:.1f}", f"{after.x if after else WIDTH - RIGHT:.1f},{spot.y:.1f}"]
    return (
        f'<polyline class="front" points="{" ".join(steps)}" fill="none" stroke="var(--ink)" stroke-width="1.2" '
        'stroke-dasharray="5 3"/>'
    )


def _mark(spot: Spot, lines: dict[str, Series], on_front: bool) -> str:
    colour = _colour(spot.mean, lines)
    fill = colour if spot.mean.path == "captured" else "var(--panel)"
    ring = f'<circle cx="{spot.x:.1f}" cy="{spot.y:.1f}" r="{RING + 3}" fill="none" stroke="var(--ink)"/>'
    return (
        f"<g><title>{escaped(spot.mean.label)}: {spot.score:.3f} at {spot.ms:.2f} ms</title>"
        f'<circle class="mark" cx="{spot.x:.1f}" cy="{spot.y:.1f}" r="{RING}" fill="{fill}" stroke="{colour}" '
        f'stroke-width="1.6"/>{ring if on_front else ""}</g>'
    )


def _labels(spots: Sequence[Spot], on_front: Sequence[Spot]) -> tuple[list[str], list[str]]:
    """Names of the front, then of every plan at its best budget; a number where a name has no room, and its meaning."""
    best: dict[str, Spot] = {}
    for spot in spots:
        if spot.mean.name not in best or spot.score > best[spot.mean.name].score:
            best[spot.mean.name] = spot
    taken = [(spot.x - RING, spot.y - RING, spot.x + RING, spot.y + RING) for spot in spots]
    ends = [spot.x for spot in on_front[1:]] + [WIDTH - RIGHT]
    taken += [(spot.x, spot.y - 1, end, spot.y + 1) for spot, end in zip(on_front, ends, strict=True)]  # the staircase
    parts: list[str] = []
    numbered: list[str] = []
    for spot in [*on_front, *(spot for spot in best.values() if spot not in on_front)]:
        kind = "name onfront" if spot in on_front else "name"
        if not (drawn := _label(spot, spot.mean.label, kind, taken)):
            numbered.append(f"{len(numbered) + 1} {spot.mean.label}")
            drawn = _label(spot, str(len(numbered)), kind, taken, always=True)
        parts.append(drawn)
    return parts, numbered


def _label(spot: Spot, text: str, kind: str, taken: list[Box], always: bool = False) -> str:
    """Text at the first place beside a spot where it covers nothing; if there is none, nothing or ``always`` there."""
    width, gap = LETTER * len(text) * (1.15 if "onfront" in kind else 1), RING + 6
    sides = spot.x + gap, spot.x - gap - width
    near = [(x, spot.y - LINE / 2 + shift) for shift in (0, -LINE, LINE) for x in sides]
    corners = [*near, (spot.x - width / 2, spot.y - gap - LINE), (spot.x - width / 2, spot.y + gap)]
    boxes = [(left, top, left + width, top + LINE) for left, top in corners]
    box = next((box for box in boxes if _fits(box, taken)), boxes[0] if always else None)
    if box is None:
        return ""
    taken.append(box)
    return f'<text class="{kind}" x="{box[0]:.1f}" y="{box[1] + 10:.1f}">{escaped(text)}</text>'


def _fits(box: Box, taken: Sequence[Box]) -> bool:
    left, top, right, bottom = box
    inside = left > LEFT and right < WIDTH - 2 and top > 0 and bottom < HEIGHT - BOTTOM
    return inside and all(right < a or left > c or bottom < b or top > d for a, b, c, d in taken)
