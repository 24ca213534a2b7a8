"""What each layer's selection kept: the ten heaviest tokens, and the attention mass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from kvsift.eval.page.html import details, heat, table
from kvsift.eval.page.means import Mean

MEASURES = {2: "Ten heaviest tokens seen", 3: "Attention mass recovered"}  # by their place in a layer's counters

Found = dict[tuple[int, int, str, int], list[float]]  # budget, measure, name, layer


def render(result: dict[str, Any], means: Sequence[Mean]) -> str:
    """Two tables per budget, over all tasks and lengths: a row per plan, a column per layer."""
    rows = {row["plan"]: row for row in result["rows"]}
    found: Found = defaultdict(list)
    for sample in result["samples"]:
        row = rows[sample["plan"]]
        for layer in sample.get("layers", ()):
            for measure in MEASURES:
                if row["budget"] is not None and layer[measure] is not None:
                    found[row["budget"], measure, row["name"], layer[0]].append(layer[measure])
    if not found:
        return ""
    budgets = sorted({budget for budget, *_ in found})
    names = {each.name: each.is_reference for each in means}
    parts = [
        details(f"Budget {budget:,}", "".join(_table(found, budget, measure, names) for measure in MEASURES),
                budget == budgets[len(budgets) // 2])
        for budget in budgets
    ]  # fmt: skip
    note = "Means over all tasks and lengths, from sampled decode steps. Dense layers are left out."
    return f"<p class=soft>{note}</p>" + "".join(parts)


def _table(found: Found, budget: int, measure: int, names: dict[str, bool]) -> str:
    own = {key[2:]: fmean(values) for key, values in found.items() if key[:2] == (budget, measure)}
    layers = sorted({layer for _, layer in own})
    shown = [name for name in names if any((name, layer) in own for layer in layers)]
    rows = [[name, *(heat(own.get((name, layer)), f"{name}, layer {layer}") for layer in layers)] for name in shown]
    soft = [index for index, name in enumerate(shown) if names[name]]
    head = ["plan", *(f"layer {layer}" for layer in layers)]
    return table(head, rows, f"{MEASURES[measure]}, budget {budget:,}", soft)
