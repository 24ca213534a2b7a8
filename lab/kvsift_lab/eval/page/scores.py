"""Scores: means over tasks, charts against counted visible tokens, and every score by task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp
from statistics import fmean
from typing import Any

from kvsift_lab.eval.page.charts import ChartPoint, Level, Series, legend, line_chart
from kvsift_lab.eval.page.means import PlanMean, at_length, dense_of, lengths_of, percent_of_dense, place
from kvsift_lab.eval.page.parts import Cell, Figure, Fold, Parts, SideBySide, Table, shown
from kvsift_lab.numbers import grouped

MOST_LINES = 9  # of one chart, to stay distinguishable
TASKS = 5  # columns of marks that fit a screen

Groups = dict[tuple[str, Any], list[dict[str, Any]]]


def mean_scores(result: dict[str, Any], means: Sequence[PlanMean]) -> Parts:
    """Return a row per plan and a column per length and budget; nothing for one column, which the next section has."""
    lengths = lengths_of(means)
    columns = [(length, budget) for length in lengths for budget in result["recipe"]["budgets"]]
    if len(columns) < 2:
        return []
    by_key = {(mean.name, mean.budget, mean.length): mean for mean in means}
    names = {mean.name: mean for mean in means}
    rows = []
    for name in names:
        own = [by_key.get((name, budget, length)) or by_key.get((name, None, length)) for length, budget in columns]
        rows.append([name, *(_tint(mean, means, length) for mean, (length, _) in zip(own, columns, strict=True))])
    soft = [index for index, mean in enumerate(names.values()) if mean.is_reference]
    several = len(lengths) > 1
    head = [f"{length:,} tokens, budget {budget:,}" if several and length else f"budget {budget:,}"
            for length, budget in columns]  # fmt: skip
    where = "" if several or not lengths[0] else f"; {lengths[0]:,} tokens"
    return [Table(["plan", *head], rows, f"Mean over tasks, percent of dense{where}", soft)]


def _tint(own: PlanMean | None, means: Sequence[PlanMean], length: int | None) -> Any:
    """Return a mean score with its percent of dense, on a light heat colour."""
    if own is None or own.score is None:
        return "-"
    dense = dense_of(means, length)
    share = own.score / (dense.score if dense and dense.score else 1.0)
    colour = f"--v:{40 * min(share, 1.0):.0f}%"
    return Cell(f"{own.score:.3f}", "tint", colour, beside=percent_of_dense(own, dense))


def against_tokens(result: dict[str, Any], means: Sequence[PlanMean]) -> Parts:
    """Return lines over budgets for few plans, otherwise a row of marks per plan; and every number in tables."""
    groups: Groups = grouped(result["cells"], "task", "length")
    if not groups:
        return ["There is no sample yet."]
    numbers = Fold("Every number", [_numbers(where, cells) for where, cells in groups.items()])
    lines = lines_of(result)
    if len(result["recipe"]["budgets"]) < 2 or len(lines) > MOST_LINES:
        return [*_marks(result, means), numbers]
    by_task = [
        _by_task(result, means, length, budget)
        for length in lengths_of(means)
        for budget in result["recipe"]["budgets"]
    ]
    return [*_charts(result, groups, lines), Fold("Scores by task", by_task), numbers]


def lines_of(result: dict[str, Any]) -> dict[str, Series]:
    """Return the line of each row without points, the same in all charts: plans, then references."""
    rows = {row["name"]: row["role"] != "plan" for row in result["rows"] if row["phase"] is not None}
    names = sorted(rows, key=lambda name: rows[name])  # stable
    return {name: Series(name, (), style, rows[name]) for style, name in enumerate(names)}


def _charts(result: dict[str, Any], groups: Groups, lines: dict[str, Series]) -> Parts:
    chance = {(row["task"], row["length"]): row["score"] for row in result["chance"]}
    charts = [_chart(where, cells, lines, chance.get(where)) for where, cells in groups.items()]
    column = 480 if len(charts) in (2, 4) else 350  # pixels, so that no row has a single chart
    note = "Marks at one budget are shifted so that every interval is visible."
    return [legend(list(lines.values())), SideBySide(charts, "grid", f"--column:{column}px"), note]


def _chart(
    where: tuple[str, Any], cells: list[dict[str, Any]], lines: dict[str, Series], chance: float | None
) -> Figure:
    series = []
    for name, line in lines.items():
        own = [cell for cell in cells if cell["name"] == name and cell["counted_tokens"]]
        points = [ChartPoint(cell["counted_tokens"], cell["score"], cell["low"], cell["high"]) for cell in own]
        series += [replace(line, points=points)] if points else []
    levels = [Level(cell["name"], cell["score"]) for cell in cells if cell["phase"] is None]
    levels += [] if chance is None else [Level("chance", chance)]
    title = place(where)
    return Figure(title, [line_chart(f"Score of {title}", "visible tokens, counted", "score", series, levels)])


def _numbers(where: tuple[str, Any], cells: list[dict[str, Any]]) -> Table:
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
    return Table(head, rows, place(where), soft)


def _cells_at(result: dict[str, Any], length: int | None) -> dict[tuple[str, str, int | None], dict[str, Any]]:
    return {(cell["task"], cell["name"], cell["budget"]): cell for cell in result["cells"] if cell["length"] == length}


def _chance_at(result: dict[str, Any], length: int | None) -> dict[str, float]:
    """Return the score of chance by task."""
    return {row["task"]: row["score"] for row in result["chance"] if row["length"] == length}


def _by_task(result: dict[str, Any], means: Sequence[PlanMean], length: int | None, budget: int) -> Table:
    """Return a table as in papers: a row per plan, a column per task."""
    cells = _cells_at(result, length)
    tasks = list(dict.fromkeys(task for task, *_ in cells))
    own = [mean for mean in at_length(means, length) if mean.budget in (None, budget)]
    rows = []
    for mean in own:
        scores = [cells.get((task, mean.name, mean.budget)) for task in tasks]
        rows.append(
            [mean.name, shown(mean.tokens, 0), *(shown(cell["score"] if cell else None, 2) for cell in scores),
             shown(mean.score, 3), percent_of_dense(mean, dense_of(means, length))]
        )  # fmt: skip
    soft = [index for index, mean in enumerate(own) if mean.is_reference]
    if levels := _chance_at(result, length):
        soft.append(len(rows))
        guessed = [shown(levels.get(task), 2) for task in tasks]
        rows.append(["chance", "-", *guessed, shown(fmean(levels.values()), 3), "-"])
    where = f"{length:,} tokens, " if length else ""
    return Table(["plan", "visible tokens", *tasks, "mean", "of dense"], rows, f"{where}budget {budget:,}", soft)


def _marks(result: dict[str, Any], means: Sequence[PlanMean]) -> Parts:
    """Return tables of every length, each score as a number and a mark on its interval; the longest is open."""
    lengths = lengths_of(means)
    parts: Parts = [table for length in lengths for table in _mark_tables(result, at_length(means, length), length)]
    if len(lengths) > 1:
        titles = {length: f"{length:,} tokens" if length else "Files" for length in lengths}
        parts = [
            Fold(title, _mark_tables(result, at_length(means, length), length), length == lengths[-1])
            for length, title in titles.items()
        ]
    return ["A mark is the score from 0 to 1, its line the interval, the dashed line dense.", *parts]


def _mark_tables(result: dict[str, Any], means: Sequence[PlanMean], length: int | None) -> list[Table]:
    cells, dense, chance = _cells_at(result, length), dense_of(means, length), _chance_at(result, length)
    tasks = list(dict.fromkeys(task for task, *_ in cells))
    ceilings = {task: cells.get((task, dense.name, dense.budget)) for task in tasks} if dense else {}
    tables = []
    for first in range(0, len(tasks), TASKS):
        some = tasks[first : first + TASKS]
        overall = not first  # columns over all tasks, once
        rows: list[list[Any]] = []
        for mean in means:
            marks = [_mark(cells.get((task, mean.name, mean.budget)), ceilings.get(task)) for task in some]
            means_cells = [shown(mean.tokens, 0), shown(mean.score, 3), percent_of_dense(mean, dense)]
            rows.append([mean.label, *(means_cells if overall else []), *marks])
        if chance:
            levels = [_unmarked(shown(chance.get(task), 2)) for task in some]
            rows.append(["chance", *(["-", shown(fmean(chance.values()), 3), "-"] if overall else []), *levels])
        soft = [index for index, mean in enumerate(means) if mean.is_reference] + [len(means)]
        head = ["plan", *(["visible tokens", "mean", "of dense"] if overall else []), *some]
        tables.append(Table(head, rows, place((", ".join(some), length)), soft))
    return tables


def _mark(cell: dict[str, Any] | None, dense: dict[str, Any] | None) -> Cell:
    if cell is None:
        return _unmarked("-")
    ends = {"mean": cell["score"], "low": cell["low"], "high": cell["high"]}
    ends |= {"dense": dense["score"]} if dense else {}
    style = ";".join(f"--{key}:{100 * value:.1f}%" for key, value in ends.items())
    hint = f"{cell['low']:.2f} to {cell['high']:.2f}, {cell['num_samples']} samples"
    return Cell(f"{cell['score']:.2f}", "dot", hint=hint, mark=style)


def _unmarked(text: str) -> Cell:
    """Return a number without a mark, aligned with marked ones."""
    return Cell(text, "dot", mark="visibility:hidden")
