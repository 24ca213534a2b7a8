"""Scores against counted visible tokens: lines over budgets for few plans, otherwise a row of marks per plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import exp
from typing import Any

from kvsift_lab.eval.page import score_marks, scores
from kvsift_lab.eval.page.html import details, figure, shown, table
from kvsift_lab.eval.page.line_chart import ChartPoint, Level, Series, legend, line_chart
from kvsift_lab.eval.page.means import PlanMean, place

MOST_LINES = 9  # of one chart, to stay distinguishable

Groups = dict[tuple[str, Any], list[dict[str, Any]]]


def render(result: dict[str, Any], means: Sequence[PlanMean]) -> str:
    """Return charts with their legend, and every number in tables."""
    groups: Groups = defaultdict(list)
    for cell in result["cells"]:
        groups[cell["task"], cell["length"]].append(cell)
    if not groups:
        return "<p>There is no sample yet.</p>"
    numbers = details("Every number", "".join(_numbers(where, cells) for where, cells in groups.items()))
    lines = lines_of(result)
    if len(result["recipe"]["budgets"]) < 2 or len(lines) > MOST_LINES:
        return score_marks.render(result, means) + numbers
    return _charts(result, groups, lines) + details("Scores by task", scores.by_task(result, means)) + numbers


def lines_of(result: dict[str, Any]) -> dict[str, Series]:
    """Return the line of each row without points, the same in all charts: plans, then references."""
    rows = {row["name"]: row["role"] != "plan" for row in result["rows"] if row["phase"] is not None}
    names = sorted(rows, key=lambda name: rows[name])  # stable
    return {name: Series(name, (), style, rows[name]) for style, name in enumerate(names)}


def _charts(result: dict[str, Any], groups: Groups, lines: dict[str, Series]) -> str:
    chance = {(row["task"], row["length"]): row["score"] for row in result["chance"]}
    charts = [_chart(where, cells, lines, chance.get(where)) for where, cells in groups.items()]
    note = "<p class=soft>Marks at one budget are shifted so that every interval is visible.</p>"
    column = 480 if len(charts) in (2, 4) else 350  # pixels, so that no row has a single chart
    return legend(list(lines.values())) + f'<div class=grid style="--column:{column}px">{"".join(charts)}</div>{note}'


def _chart(where: tuple[str, Any], cells: list[dict[str, Any]], lines: dict[str, Series], chance: float | None) -> str:
    series = []
    for name, line in lines.items():
        own = [cell for cell in cells if cell["name"] == name and cell["counted_tokens"]]
        points = [ChartPoint(cell["counted_tokens"], cell["score"], cell["low"], cell["high"]) for cell in own]
        series += [replace(line, points=points)] if points else []
    levels = [Level(cell["name"], cell["score"]) for cell in cells if cell["phase"] is None]
    levels += [] if chance is None else [Level("chance", chance)]
    title = place(where)
    return figure(title, line_chart(f"Score of {title}", "visible tokens, counted", "score", series, levels, True))


def _numbers(where: tuple[str, Any], cells: list[dict[str, Any]]) -> str:
    head = [
        "plan", "budget", "visible tokens", "score", "interval", "samples", "density", "recall", "recovered",
        "perplexity", "KL to dense", "agreement",
    ]  # fmt: skip
    rows = [
        [
            cell["name"],
            cell["budget"] or "-",
            shown(cell["counted_tokens"], 0),
            f"{cell['score']:.3f}",
            f"{cell['low']:.2f} to {cell['high']:.2f}",
            cell["num_samples"],
            *(shown(cell[key], 3) for key in ("density", "recall", "recovery")),
            shown(exp(cell["nll"]) if "nll" in cell else None, 3),
            *(shown(cell.get(key), 3) for key in ("kl", "agreement")),
        ]
        for cell in cells
    ]
    soft = [index for index, cell in enumerate(cells) if cell["role"] != "plan"]
    return table(head, rows, place(where), soft)
