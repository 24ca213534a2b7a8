"""Pareto chart: score against TPOT, with the plans that no other beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.text import Annotation
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter
from matplotlib.transforms import Bbox

from kvsift_lab.eval.page.charts import COLOURS, Series, figure_of, inline, mark, settings
from kvsift_lab.eval.page.costs import at_a_time
from kvsift_lab.eval.page.means import PlanMean, at_length, dense_of, is_unsolved, lengths_of
from kvsift_lab.eval.page.parts import Figure, Parts, percent
from kvsift_lab.eval.page.scores import lines_of

SIZE = 900, 400  # pixels
RING = 8  # pixels around a point that no name covers
PLACES = (  # of a label beside its point, in pixels: offset, and the side of the text that is there
    *((x, y, "left" if x > 0 else "right") for y in (0, 13, -13) for x in (9, -9)),
    *((0, y, "center") for y in (15, -15)),
)


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
    for mean in sorted(runs, key=lambda run: (_ms(run), -_score(run))):
        if not front or _score(mean) > _score(front[-1]):
            front.append(mean)
    return front


def _ms(mean: PlanMean) -> float:
    assert mean.tpot_s is not None
    return 1e3 * mean.tpot_s[1]


def _score(mean: PlanMean) -> float:
    return mean.score or 0.0


def _figure(means: Sequence[PlanMean], length: int | None, lines: dict[str, Series]) -> Figure:
    front, dense = front_of(means), dense_of(means, length)
    listed = ", ".join(f"{mean.label} ({_ms(mean):.2f} ms, {mean.score:.3f})" for mean in front)
    text = f"Pareto front: {listed}."
    faster = [mean for mean in front if dense and _ms(mean) < _ms(dense)]
    best = max(faster, key=_score, default=None)
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
    """Return the chart and the legend of its numbers."""
    texts, ink = [], COLOURS["ink"]
    with settings():
        figure = figure_of(*SIZE)
        axis = figure.subplots()
        for name in dict.fromkeys(mean.name for mean in means):
            own = sorted((mean for mean in means if mean.name == name), key=lambda mean: mean.budget or 0)
            colour = lines[name].colour if name in lines else ink  # dense has no line
            axis.plot([_ms(mean) for mean in own], [_score(mean) for mean in own], color=colour, alpha=0.3)
            for mean in own:
                texts.append(f"{mean.label}: {_score(mean):.3f} at {_ms(mean):.2f} ms")
                fill = colour if mean.path == "captured" else COLOURS["panel"]
                look = {"edgecolors": colour, "facecolors": fill, "linewidths": 1.6}
                mark(axis, _ms(mean), _score(mean), 55, texts[-1], **look)
                if mean in front:
                    mark(axis, _ms(mean), _score(mean), 160, texts[-1], edgecolors=ink, facecolors="none")
        times, scores = [_ms(mean) for mean in means], [_score(mean) for mean in means]
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(
            LogLocator(subs=(1, 2, 3, 5, 7)) if max(times) > 3 * min(times) else MaxNLocator(6, steps=[1, 2, 5, 10])
        )
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        room = 0.12 * (max(scores) - min(scores) or 1.0)  # for labels
        axis.set(xlim=(min(times) / 1.15, max(times) * 1.3), ylim=(max(0.0, min(scores) - room), max(scores) + room))
        axis.set(xlabel="TPOT, ms (logarithmic; left is faster)", ylabel="mean score")
        axis.grid(axis="x", visible=False)
        x, y = [*map(_ms, front)], [*map(_score, front)]
        (bottom, _), (_, right) = axis.get_ylim(), axis.get_xlim()
        dashed: dict[str, Any] = {"linewidth": 1.2, "linestyle": (0, (5, 3))}
        axis.step([x[0], *x, right], [bottom, *y, y[-1]], color=ink, where="post", **dashed)
        figure.draw_without_rendering()  # finds the place of the axes
        numbered = _name(axis, means, front)
        return inline(figure, f"Score against time per token, {where}", "; ".join(texts)), numbered


def _name(axis: Axes, means: Sequence[PlanMean], front: Sequence[PlanMean]) -> list[str]:
    """Name the front, and each plan at its best budget; names without room are numbers, whose legend is returned."""
    spots = {mean: axis.transData.transform((_ms(mean), _score(mean))) for mean in means}
    occupied = [Bbox.from_extents(x - RING, y - RING, x + RING, y + RING) for x, y in spots.values()]
    ends = [*(spots[mean][0] for mean in front[1:]), axis.bbox.x1]
    occupied += [Bbox.from_extents(*spots[mean], end, spots[mean][1] + 1) for mean, end in zip(front, ends)]
    names = dict.fromkeys(mean.name for mean in means)
    best = [max((mean for mean in means if mean.name == name), key=_score) for name in names]
    numbered: list[str] = []
    for mean in dict.fromkeys([*front, *best]):
        look: dict[str, Any] = {"weight": "bold" if mean in front else "normal", "in_layout": False, "va": "center"}
        name = axis.annotate(mean.label, (_ms(mean), _score(mean)), textcoords="offset points", xytext=(9, 0), **look)
        if not _fits(name, axis, occupied):
            numbered.append(f"{len(numbered) + 1} {mean.label}")
            name.set_text(str(len(numbered)))
            _fits(name, axis, occupied)
        occupied.append(name.get_window_extent())
    return numbered


def _fits(name: Annotation, axis: Axes, occupied: Sequence[Bbox]) -> bool:
    """Move a name to the first free place beside its point; without one, to the last place."""
    for x, y, side in PLACES:
        name.set(position=(x, y), ha=side)
        box = name.get_window_extent()
        if axis.bbox.contains(*box.min) and axis.bbox.contains(*box.max) and not box.count_overlaps(occupied):
            return True
    return False
