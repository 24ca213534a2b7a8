"""Score marks: a row per plan and budget, a column per task, each score as a number and a mark on its interval."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from kvsift_lab.eval.page.html import Cell, details, shown, table
from kvsift_lab.eval.page.means import PlanMean, dense_of, percent_of_dense, place
from kvsift_lab.eval.page.scores import chance_of

TASKS = 5  # columns that fit a screen


def render(result: dict[str, Any], means: Sequence[PlanMean]) -> str:
    """Return tables of every length; the longest is open."""
    lengths = list(dict.fromkeys(mean.length for mean in means))
    parts = [_tables(result, [mean for mean in means if mean.length == length], length) for length in lengths]
    if len(lengths) > 1:
        titles = [f"{length:,} tokens" if length else "Files" for length in lengths]
        parts = [details(title, part, title == titles[-1]) for title, part in zip(titles, parts, strict=True)]
    note = "<p class=soft>A mark is the score from 0 to 1, its line the interval, the dashed line dense.</p>"
    return note + "".join(parts)


def _tables(result: dict[str, Any], means: Sequence[PlanMean], length: int | None) -> str:
    cells = {(cell["task"], cell["name"], cell["budget"]): cell for cell in result["cells"] if cell["length"] == length}
    tasks = list(dict.fromkeys(task for task, *_ in cells))
    dense, chance = dense_of(means, length), chance_of(result, length)
    ceilings = {task: cells.get((task, dense.name, dense.budget)) for task in tasks} if dense else {}
    parts = []
    for first in range(0, len(tasks), TASKS):
        some = tasks[first : first + TASKS]
        overall = not first  # columns over all tasks, once
        rows: list[list[Any]] = []
        for mean in means:
            own = [cells.get((task, mean.name, mean.budget)) for task in some]
            marks = [_mark(cell, ceilings.get(task)) for task, cell in zip(some, own, strict=True)]
            means_cells = [shown(mean.tokens, 0), shown(mean.score, 3), percent_of_dense(mean, dense)]
            rows.append([mean.label, *(means_cells if overall else []), *marks])
        if chance:
            levels = [_plain(shown(chance.get(task), 2)) for task in some]
            rows.append(["chance", *(["-", shown(fmean(chance.values()), 3), "-"] if overall else []), *levels])
        soft = [index for index, mean in enumerate(means) if mean.is_reference] + [len(means)]
        head = ["plan", *(["visible tokens", "mean", "of dense"] if overall else []), *some]
        parts.append(table(head, rows, place((", ".join(some), length)), soft))
    return "".join(parts)


def _mark(cell: dict[str, Any] | None, dense: dict[str, Any] | None) -> Any:
    if cell is None:
        return _plain("-")
    ends = {"mean": cell["score"], "low": cell["low"], "high": cell["high"]}
    ends |= {"dense": dense["score"]} if dense else {}
    style = ";".join(f"--{key}:{100 * value:.1f}%" for key, value in ends.items())
    line = "<b></b>" if dense else ""
    hint = f"{cell['low']:.2f} to {cell['high']:.2f}, {cell['num_samples']} samples"
    return Cell(f'{cell["score"]:.2f}<i style="{style}">{line}</i>', "dot", hint=hint)


def _plain(text: str) -> Cell:
    """Return a number without a mark, aligned with marked ones."""
    return Cell(f'{text}<i style="visibility:hidden"></i>', "dot")
