"""Mean scores at a glance, and score tables as papers print them: a row per plan, a column per task."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from kvsift.eval.page.html import shown, table, tint
from kvsift.eval.page.means import Mean, dense_of, percent_of_dense


def render(result: dict[str, Any], means: Sequence[Mean]) -> str:
    """A row per plan, a column per length and budget; nothing if there is one column, which the next section has."""
    lengths = list(dict.fromkeys(each.length for each in means))
    columns = [(length, budget) for length in lengths for budget in result["recipe"]["budgets"]]
    if len(columns) < 2:
        return ""
    found = {(each.name, each.budget, each.length): each for each in means}
    names = {each.name: each for each in means}
    rows = []
    for name in names:
        cells = []
        for length, budget in columns:
            own = found.get((name, budget, length)) or found.get((name, None, length))
            dense = dense_of(means, length)
            cells.append(_cell(own, dense))
        rows.append([name, *cells])
    soft = [index for index, each in enumerate(names.values()) if each.is_reference]
    head = [_column(length if len(lengths) > 1 else None, budget) for length, budget in columns]
    where = f"; {lengths[0]:,} tokens" if len(lengths) == 1 and lengths[0] else ""
    return table(["plan", *head], rows, f"Mean over tasks, percent of dense{where}", soft)


def _column(length: int | None, budget: int) -> str:
    return f"{length:,} tokens, budget {budget:,}" if length else f"budget {budget:,}"


def _cell(own: Mean | None, dense: Mean | None) -> Any:
    if own is None or own.score is None:
        return "-"
    whole = dense.score if dense and dense.score else 1.0
    return tint(f"{own.score:.3f}", percent_of_dense(own, dense), own.score / whole)


def by_task(result: dict[str, Any], means: Sequence[Mean]) -> str:
    """A table per length and budget."""
    lengths = list(dict.fromkeys(each.length for each in means))
    return "".join(
        _tasks(result, means, length, budget) for length in lengths for budget in result["recipe"]["budgets"]
    )


def chance_of(result: dict[str, Any], length: int | None) -> dict[str, float]:
    """By task, the score of answers that know nothing of the context."""
    return {each["task"]: each["score"] for each in result["chance"] if each["length"] == length}


def _tasks(result: dict[str, Any], means: Sequence[Mean], length: int | None, budget: int) -> str:
    cells = {(cell["task"], cell["name"], cell["budget"]): cell for cell in result["cells"] if cell["length"] == length}
    tasks = list(dict.fromkeys(task for task, *_ in cells))
    own = [each for each in means if each.length == length and each.budget in (None, budget)]
    dense = dense_of(means, length)
    rows = []
    for each in own:
        scores = [cells.get((task, each.name, each.budget)) for task in tasks]
        rows.append(
            [each.name, shown(each.tokens, 0), *(shown(cell and cell["score"], 2) for cell in scores),
             shown(each.score, 3), percent_of_dense(each, dense)]
        )  # fmt: skip
    soft = [index for index, each in enumerate(own) if each.is_reference]
    if levels := chance_of(result, length):
        soft.append(len(rows))
        guessed = [shown(levels.get(task), 2) for task in tasks]
        rows.append(["chance", "-", *guessed, shown(fmean(levels.values()), 3), "-"])
    where = f"{length:,} tokens, " if length else ""
    return table(["plan", "visible tokens", *tasks, "mean", "of dense"], rows, f"{where}budget {budget:,}", soft)
