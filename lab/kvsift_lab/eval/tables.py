"""Markdown tables of results."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import exp
from statistics import fmean
from typing import Any

from kvsift_lab.numbers import table


def quality_table(result: dict[str, Any]) -> str:
    """Return a table per task and length: a row per plan, a column per budget: right answers, or the mean
    score where an answer may be partly right."""
    names, plans, budgets = _names(result), _plans(result), result["recipe"]["budgets"]
    cells: dict[tuple[str, Any, str, int | None], list[float]] = defaultdict(list)
    for sample in result["samples"]:
        cells[sample["task"], sample["length"], names[sample["plan"]], sample["budget"]].append(sample["score"])
    lengths = list(dict.fromkeys(sample["length"] for sample in result["samples"])) or [None]
    tables = []
    for task in _tasks(result):
        for length in sorted(lengths, key=lambda length: length or 0):
            own = {key[2:]: scores for key, scores in cells.items() if key[:2] == (task, length)}
            num_questions = max((len(scores) for scores in own.values()), default=0)
            where = f" at {length:,}" if len(lengths) > 1 and length else ""
            rows = [
                [plan, *(_cell(own.get((plan, None)) or own.get((plan, budget))) for budget in budgets)]
                for plan in plans
            ]
            tables.append(table([f"{task}{where} ({num_questions} questions)", *budgets], rows))
    return "\n\n".join(tables)


def score_table(tables: dict[str, Any], budgets: Sequence[int]) -> str:
    """Return a table per task and length of a summary: scores with 95 % intervals and counted tokens, and the score of
    chance."""
    parts = []
    groups: dict[tuple[str, Any], dict[tuple[str, int | None], dict[str, Any]]] = defaultdict(dict)
    for cell in tables["cells"]:
        groups[cell["task"], cell["length"]][cell["name"], cell["budget"]] = cell
    levels = {(row["task"], row["length"]): row["score"] for row in tables["chance"]}
    for (task, length), cells in groups.items():
        where = f" at {length:,}" if length else ""
        most = max(cell["num_samples"] for cell in cells.values())
        rows = [
            [name, *(_interval_cell(cells.get((name, None)) or cells.get((name, budget))) for budget in budgets)]
            for name in dict.fromkeys(name for name, _ in cells)
        ]
        if (task, length) in levels:
            rows.append(["chance", *[f"{levels[task, length]:.2f}"] * len(budgets)])
        parts.append(table([f"{task}{where}, {most} samples", *budgets], rows))
        if [task, length] in tables["unsolved"]:
            parts.append("Dense is not measurably better than chance here: this table does not compare plans.")
    return "\n\n".join(parts)


def budget_table(result: dict[str, Any], budget: int) -> str:
    """Return the table of one budget: a row per plan, a column per task, visible tokens and recovery."""
    names, columns = _names(result), _tasks(result)
    by_plan: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for sample in result["samples"]:
        if sample["budget"] in (None, budget):
            by_plan[names[sample["plan"]]].append(sample)
    rows = []
    for plan in _plans(result):
        samples = by_plan[plan]
        tasks = [_cell([s["score"] for s in samples if s["task"] == task]) for task in columns]
        visible = _mean(s["sparse_layer_visible_tokens"] or s["visible_tokens"] for s in samples)
        recovery = _mean(s["recovery"] for s in samples if s["recovery"] is not None)
        recovered = "-" if recovery is None else f"{100 * recovery:.0f} %"
        rows.append([plan, *tasks, f"{visible:,.0f}", recovered])
    return table([f"budget {budget}", *columns, "visible tokens", "attention mass recovered"], rows)


def prefill_table(result: dict[str, Any]) -> str:
    """Return the table of plans that are sparse in prefill: a row per plan, a column per task with samples, and visible
    tokens per prompt token in sparse layers."""
    present = {sample["task"] for sample in result["samples"]}
    tasks = [task for task in _tasks(result) if task in present]
    by_plan: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for sample in result["samples"]:
        by_plan[sample["plan"]].append(sample)
    rows = []
    for row in result["rows"]:
        samples = by_plan[row["plan"]]
        cells = [_cell([s["score"] for s in samples if s["task"] == task]) for task in tasks]
        cells.append(_cell([s["score"] for s in samples]))
        visible = _mean(s["prefill_visible_tokens"] for s in samples if s["prefill_visible_tokens"])
        name = row["plan"].replace(f":budget={row['budget']}", "").replace(":dense_layers=none", "")
        rows.append([f"`{name}`", *cells, "all" if visible is None else f"{visible:,.0f}"])
    return table(["plan", *tasks, "all", "visible tokens in prefill"], rows)


def fidelity_table(result: dict[str, Any]) -> str:
    """Return a table per length of predictions: a row per plan, a column per budget, mean KL(dense || plan) and how
    often the likeliest token agrees, over contexts that all plans have finished."""
    names, budgets = _names(result), result["recipe"]["budgets"]
    cells: dict[tuple[int, str, int | None], list[tuple[float, float]]] = defaultdict(list)
    for sample in finished_by_all(result):
        if "kl" in sample and sample["budget"] is not None:
            key = (sample["length"], names[sample["plan"]], sample["budget"])
            cells[key].append((sample["kl"], sample["agreement"]))
    tables = []
    for length in sorted({length for length, _, _ in cells}):
        rows = []
        for plan in dict.fromkeys(name for of, name, _ in cells if of == length):
            means = [map(fmean, zip(*cells[length, plan, budget])) for budget in budgets]
            rows.append([plan, *(f"{kl:.4f} ({same:.2f})" for kl, same in means)])
        tables.append(table([f"{length:,} tokens: KL (agreement)", *budgets], rows))
    return "\n\n".join(tables)


def finished_by_all(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the samples of contexts that every plan has finished; contexts differ, so means need the same ones."""
    counts = Counter((sample["task"], sample["length"], sample["seed"]) for sample in result["samples"])
    return [
        sample for sample in result["samples"]
        if counts[sample["task"], sample["length"], sample["seed"]] == len(result["rows"]) * sample["questions"]
    ]  # fmt: skip


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return sum(values) / len(values) if values else None


def _cell(scores: Sequence[float] | None) -> str:
    if not scores:
        return "-"
    if set(scores) <= {0, 1}:
        return f"{sum(scores):.0f}/{len(scores)}"
    return f"{sum(scores) / len(scores):.2f} ({len(scores)})"


def _interval_cell(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "-"
    counted = "" if cell["counted_tokens"] is None else f", {cell['counted_tokens']:,.0f} tokens"
    perplexity = f", perplexity {exp(cell['nll']):.2f}" if "nll" in cell else ""
    if "kl" in cell:
        perplexity += f", KL {cell['kl']:.3f}, agreement {cell['agreement']:.2f}"
    return f"{cell['score']:.2f} ({cell['low']:.2f} to {cell['high']:.2f}{counted}{perplexity})"


def _tasks(result: dict[str, Any]) -> list[str]:
    return [*result["recipe"]["tasks"], *(file["name"] for file in result["recipe"].get("files", ()))]


def _names(result: dict[str, Any]) -> dict[str, str]:
    """Return the mapping from plans of samples to names of rows."""
    return {row["plan"]: row["name"] for row in result["rows"]}


def _plans(result: dict[str, Any]) -> list[str]:
    """Return the names of rows in the recipe's order."""
    return list(dict.fromkeys(row["name"] for row in result["rows"]))
