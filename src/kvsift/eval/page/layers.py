"""What each layer's selection kept: the ten heaviest tokens, and the attention mass."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from statistics import fmean
from typing import Any

from kvsift.eval.page.html import details, figure
from kvsift.eval.page.lines import Point, Series, legend, line_chart
from kvsift.eval.page.quality import lines_of

MEASURES = {"recall": (2, "ten heaviest tokens seen"), "recovery": (3, "attention mass recovered")}


def render(result: dict[str, Any]) -> str:
    """Two charts per budget, over all tasks and lengths."""
    rows = {row["plan"]: row for row in result["rows"]}
    found: dict[tuple[int, str, str, int], list[float]] = defaultdict(list)  # budget, measure, name, layer
    for sample in result["samples"]:
        row = rows[sample["plan"]]
        for layer in sample.get("layers", ()):
            for measure, (place, _) in MEASURES.items():
                if row["budget"] is not None and layer[place] is not None:
                    found[row["budget"], measure, row["name"], layer[0]].append(layer[place])
    if not found:
        return ""
    lines = lines_of(result)
    budgets = sorted({budget for budget, *_ in found})
    parts = [legend(list(lines.values()))]
    for budget in budgets:
        charts = "".join(_chart(found, budget, measure, lines) for measure in MEASURES)
        parts.append(
            details(f"Budget {budget:,}", f"<div class=grid>{charts}</div>", budget == budgets[len(budgets) // 2])
        )
    note = "<p class=soft>Means over all tasks and lengths, from sampled decode steps; dense layers are not in it.</p>"
    return note + "".join(parts)


def _chart(
    found: dict[tuple[int, str, str, int], list[float]], budget: int, measure: str, lines: dict[str, Series]
) -> str:
    title = MEASURES[measure][1]
    series = []
    for name, line in lines.items():
        means = {key[3]: fmean(values) for key, values in found.items() if key[:3] == (budget, measure, name)}
        points = [Point(layer, mean, mean, mean) for layer, mean in sorted(means.items())]
        series += [replace(line, points=points)] if points else []
    drawing = line_chart(f"{title}, budget {budget:,}", "layer", "share", series)
    return figure(f"{title[0].upper()}{title[1:]}, budget {budget:,}", drawing)
