"""Top-10 token recall and recovered attention mass of each layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from kvsift_lab.eval.page.html import details, heat, table
from kvsift_lab.eval.page.means import PlanMean

MEASURES = {2: "Top-10 token recall", 3: "Attention mass recovered"}  # by index in the counters of a layer

Values = dict[tuple[int, int, str, int], list[float]]  # budget, measure, name, layer


def render(result: dict[str, Any], means: Sequence[PlanMean]) -> str:
    """Return two tables per budget, over all tasks and lengths: a row per plan, a column per layer."""
    rows = {row["plan"]: row for row in result["rows"]}
    values: Values = defaultdict(list)
    for sample in result["samples"]:
        row = rows[sample["plan"]]
        for layer in sample.get("layers", ()):
            for measure in MEASURES:
                if row["budget"] is not None and layer[measure] is not None:
                    values[row["budget"], measure, row["name"], layer[0]].append(layer[measure])
    if not values:
        return ""
    budgets = sorted({budget for budget, *_ in values})
    names = {mean.name: mean.is_reference for mean in means}
    parts = [
        details(f"Budget {budget:,}", "".join(_table(values, budget, measure, names) for measure in MEASURES),
                budget == budgets[len(budgets) // 2])
        for budget in budgets
    ]  # fmt: skip
    note = "Means over all tasks and lengths from sampled decode steps, without dense layers."
    return f"<p class=soft>{note}</p>" + "".join(parts)


def _table(values: Values, budget: int, measure: int, names: dict[str, bool]) -> str:
    own = {key[2:]: fmean(own) for key, own in values.items() if key[:2] == (budget, measure)}
    layers = sorted({layer for _, layer in own})
    present = [name for name in names if any((name, layer) in own for layer in layers)]
    rows = [[name, *(heat(own.get((name, layer)), f"{name}, layer {layer}") for layer in layers)] for name in present]
    soft = [index for index, name in enumerate(present) if names[name]]
    head = ["plan", *(f"layer {layer}" for layer in layers)]
    return table(head, rows, f"{MEASURES[measure]}, budget {budget:,}", soft)
