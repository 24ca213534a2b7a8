"""Charts of the score against the tokens that were counted, a chart per task and length."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import exp
from typing import Any

from kvsift.eval.page.html import details, figure, table
from kvsift.eval.page.lines import Level, Point, Series, legend, line_chart


def render(result: dict[str, Any]) -> str:
    """Charts, their legend, and every number in tables."""
    groups: dict[tuple[str, Any], list[dict[str, Any]]] = defaultdict(list)
    for cell in result["cells"]:
        groups[cell["task"], cell["length"]].append(cell)
    if not groups:
        return "<p>Nothing has been asked yet.</p>"
    lines = lines_of(result)
    chance = {(each["task"], each["length"]): each["score"] for each in result["chance"]}
    charts = [_chart(where, cells, lines, chance.get(where)) for where, cells in groups.items()]
    numbers = "".join(_numbers(where, cells) for where, cells in groups.items())
    return legend(list(lines.values())) + f"<div class=grid>{''.join(charts)}</div>" + details("Every number", numbers)


def lines_of(result: dict[str, Any]) -> dict[str, Series]:
    """Row name -> its line without points, the same in all charts: plans first, then references."""
    rows = {row["name"]: row["role"] != "plan" for row in result["rows"] if row["phase"] is not None}
    names = sorted(rows, key=lambda name: rows[name])  # stable
    return {name: Series(name, (), style, rows[name]) for style, name in enumerate(names)}


def place(where: tuple[str, Any]) -> str:
    """A task and a length in words."""
    task, length = where
    return f"{task}, {length:,} tokens" if length else task


def _chart(where: tuple[str, Any], cells: list[dict[str, Any]], lines: dict[str, Series], chance: float | None) -> str:
    series = []
    for name, line in lines.items():
        own = [cell for cell in cells if cell["name"] == name and cell["counted_tokens"]]
        points = [Point(cell["counted_tokens"], cell["score"], cell["low"], cell["high"]) for cell in own]
        series += [replace(line, points=points)] if points else []
    levels = [Level(cell["name"], cell["score"]) for cell in cells if cell["phase"] is None]
    levels += [] if chance is None else [Level("chance", chance)]
    title = place(where)
    return figure(title, line_chart(f"Score of {title}", "visible tokens, counted", "score", series, levels, True))


def _numbers(where: tuple[str, Any], cells: list[dict[str, Any]]) -> str:
    head = ["plan", "budget", "counted", "score", "interval", "samples", "density", "recall", "recovered", "perplexity"]
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
        ]
        for cell in cells
    ]
    soft = [index for index, cell in enumerate(cells) if cell["role"] != "plan"]
    return table(head, rows, place(where), soft)


def shown(value: float | None, digits: int) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"
