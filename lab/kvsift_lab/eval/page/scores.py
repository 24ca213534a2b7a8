"""Tables of mean scores, and of scores as in papers: a row per plan, a column per task."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from kvsift_lab.eval.page.html import shown, table, tint
from kvsift_lab.eval.page.means import PlanMean, dense_of, percent_of_dense


def render(result: dict[str, Any], means: Sequence[PlanMean]) -> str:
    """Return a row per plan and a column per length and budget; empty for one column, which the next section has."""
    lengths = list(dict.fromkeys(mean.length for mean in means))
    columns = [(length, budget) for length in lengths for budget in result["recipe"]["budgets"]]
    if len(columns) < 2:
        return ""
    by_key = {(mean.name, mean.budget, mean.length): mean for mean in means}
    names = {mean.name: mean for mean in means}
    rows = []
    for name in names:
        cells = []
        for length, budget in columns:
            own = by_key.get((name, budget, length)) or by_key.get((name, None, length))
            cells.append(_cell(own, dense_of(means, length)))
        rows.append([name, *cells])
    soft = [index for index, mean in enumerate(names.values()) if mean.is_reference]
    head = [_column(length if len(lengths) > 1 else None, budget) for length, budget in columns]
    where = f"; {lengths[0]:,} tokens" if len(lengths) == 1 and lengths[0] else ""
    return table(["plan", *head], rows, f"Mean over tasks, percent of dense{where}", soft)


def _column(length: int | None, budget: int) -> str:
    return f"{length:,} tokens, budget {budget:,}" if length else f"budget {budget:,}"


def _cell(own: PlanMean | None, dense: PlanMean | None) -> Any:
    if own is None or own.score is None:
        return "-"
    whole = dense.score if dense and dense.score else 1.0
    return tint(f"{own.score:.3f}", percent_of_dense(own, dense), own.score / whole)


def by_task(result: dict[str, Any], means: Sequence[PlanMean]) -> str:
    """Return a table per length and budget."""
    lengths = list(dict.fromkeys(mean.length for mean in means))
    return "".join(
        _tasks(result, means, length, budget) for length in lengths for budget in result["recipe"]["budgets"]
    )


def chance_of(result: dict[str, Any], length: int | None) -> dict[str, float]:
    """Return the score of chance by task."""
    return {row["task"]: row["score"] for row in result["chance"] if row["length"] == length}


def _tasks(result: dict[str, Any], means: Sequence[PlanMean], length: int | None, budget: int) -> str:
    cells = {(cell["task"], cell["name"], cell["budget"]): cell for cell in result["cells"] if cell["length"] == length}
    tasks = list(dict.fromkeys(task for task, *_ in cells))
    own = [mean for mean in means if mean.length == length and mean.budget in (None, budget)]
    dense = dense_of(means, length)
    rows = []
    for mean in own:
        scores = [cells.get((task, mean.name, mean.budget)) for task in tasks]
        rows.append(
            [mean.name, shown(mean.tokens, 0), *(shown(cell and cell["score"], 2) for cell in scores),
             shown(mean.score, 3), percent_of_dense(mean, dense)]
        )  # fmt: skip
    soft = [index for index, mean in enumerate(own) if mean.is_reference]
    if levels := chance_of(result, length):
        soft.append(len(rows))
        guessed = [shown(levels.get(task), 2) for task in tasks]
        rows.append(["chance", "-", *guessed, shown(fmean(levels.values()), 3), "-"])
    where = f"{length:,} tokens, " if length else ""
    return table(["plan", "visible tokens", *tasks, "mean", "of dense"], rows, f"{where}budget {budget:,}", soft)
