"""Score tables as papers print them: a row per plan, a column per task, a table per length and budget."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from kvsift.eval.page.html import table
from kvsift.eval.page.quality import shown


def render(result: dict[str, Any]) -> str:
    """A table per length and budget, with the mean over tasks."""
    cells = result["cells"]
    lengths = list(dict.fromkeys(cell["length"] for cell in cells))
    parts = []
    for length in lengths:
        here = [cell for cell in cells if cell["length"] == length]
        tasks = list(dict.fromkeys(cell["task"] for cell in here))
        for budget in result["recipe"]["budgets"]:
            parts.append(_table(here, tasks, length, budget, result["chance"]))
    return "".join(parts)


def _table(
    cells: list[dict[str, Any]], tasks: list[str], length: int | None, budget: int, chance: list[dict[str, Any]]
) -> str:
    rows: list[list[Any]] = []
    soft: list[int] = []
    shown_cells = [cell for cell in cells if cell["budget"] in (None, budget)]
    for name in dict.fromkeys(cell["name"] for cell in shown_cells):
        own = {cell["task"]: cell for cell in shown_cells if cell["name"] == name}
        first = next(iter(own.values()))
        soft += [len(rows)] if first["role"] != "plan" else []
        counted = [cell["counted_tokens"] for cell in own.values() if cell["counted_tokens"] is not None]
        scores = [f"{own[task]['score']:.2f}" if task in own else "-" for task in tasks]
        mean = fmean(cell["score"] for cell in own.values()) if len(own) == len(tasks) else None
        rows.append([name, shown(fmean(counted) if counted else None, 0), *scores, shown(mean, 3)])
    levels = {each["task"]: each["score"] for each in chance if each["length"] == length}
    if levels:
        soft.append(len(rows))
        rows.append(["chance", "-", *(shown(levels.get(task), 2) for task in tasks), shown(fmean(levels.values()), 3)])
    where = f"{length:,} tokens, " if length else ""
    return table(["plan", "counted tokens", *tasks, "mean"], rows, f"{where}budget {budget:,}", soft)
