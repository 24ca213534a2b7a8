"""Markdown tables of results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import exp, log
from statistics import fmean
from typing import Any

from kvsift_lab.eval.intervals import bootstrap
from kvsift_lab.numbers import grouped, table


def quality_table(result: dict[str, Any]) -> str:
    """Return a table per task and length: a row per plan, a column per budget: right answers, or the mean
    score where an answer may be partly right."""
    plans, budgets = _plans(result), result["recipe"]["budgets"]
    cells = grouped(_named(result), "task", "length", "name", "budget")
    lengths = {sample["length"] for sample in result["samples"]} or {None}
    tables = []
    for task in _tasks(result):
        for length in sorted(lengths, key=lambda length: length or 0):
            own = {key[2:]: samples for key, samples in cells.items() if key[:2] == (task, length)}
            num_questions = max(map(len, own.values()), default=0)
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
    levels = {(row["task"], row["length"]): row["score"] for row in tables["chance"]}
    for (task, length), own in grouped(tables["cells"], "task", "length").items():
        cells, where = {(cell["name"], cell["budget"]): cell for cell in own}, f" at {length:,}" if length else ""
        most = max(cell["num_samples"] for cell in own)
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
    columns, rows = _tasks(result), []
    by_plan = grouped((sample for sample in _named(result) if sample["budget"] in (None, budget)), "name")
    for plan in _plans(result):
        samples = by_plan.get(plan, [])
        by_task = grouped(samples, "task")
        visible = _mean(s["sparse_layer_visible_tokens"] or s["visible_tokens"] for s in samples)
        recovery = _mean(s["recovery"] for s in samples if s["recovery"] is not None)
        recovered = "-" if recovery is None else f"{100 * recovery:.0f} %"
        rows.append([plan, *map(_cell, map(by_task.get, columns)), f"{visible:,.0f}", recovered])
    return table([f"budget {budget}", *columns, "visible tokens", "attention mass recovered"], rows)


def prefill_table(result: dict[str, Any]) -> str:
    """Return the table of plans that are sparse in prefill: a row per plan, a column per task with samples, and visible
    tokens per prompt token in sparse layers."""
    present = {sample["task"] for sample in result["samples"]}
    tasks = [task for task in _tasks(result) if task in present]
    by_plan, rows = grouped(result["samples"], "plan"), []
    for row in result["rows"]:
        samples = by_plan.get(row["plan"], [])
        by_task = grouped(samples, "task")
        visible = _mean(s["prefill_visible_tokens"] for s in samples if s["prefill_visible_tokens"])
        name = row["plan"].replace(f":budget={row['budget']}", "").replace(":dense_layers=none", "")
        cells = [*map(by_task.get, tasks), samples]
        rows.append([f"`{name}`", *map(_cell, cells), "all" if visible is None else f"{visible:,.0f}"])
    return table(["plan", *tasks, "all", "visible tokens in prefill"], rows)


def fidelity_table(result: dict[str, Any]) -> str:
    """Return a table per length of predictions: a row per plan, a column per budget: mean KL(dense || plan) with its
    interval over contexts, how often the likeliest token agrees, and the NLL above that of dense attention."""
    tables = []
    for context, samples in compared(result).items():
        dense = {sample["seed"]: sample["nll"] for sample in samples if sample["budget"] is None}
        by_plan = grouped((sample for sample in samples if sample["budget"] is not None), "name")
        rows = []
        for plan, own in by_plan.items():
            by_budget = grouped(own, "budget")
            rows.append([plan, *(_prediction(by_budget.get(budget), dense) for budget in result["recipe"]["budgets"])])
        number = len({sample["seed"] for sample in samples})
        head = f"{context:,} tokens, {number} context{'s' if number > 1 else ''}"
        head += f", dense NLL {fmean(dense.values()):.2f}" if dense else ""
        tables.append(table([head, *result["recipe"]["budgets"]], rows))
    return "\n\n".join(tables)


def _prediction(samples: Sequence[dict[str, Any]] | None, dense: dict[int, float]) -> str:
    if not samples:
        return "-"
    divergences = [sample["kl"] for sample in samples]
    low, high = bootstrap(divergences)
    interval = f" ({_nats(low)} to {_nats(high)})" if len(samples) > 1 else ""
    loss = [sample["nll"] - dense[sample["seed"]] for sample in samples if sample["seed"] in dense]
    above = f", {fmean(loss):+.3f}" if len(loss) == len(samples) else ""
    same = fmean(sample["agreement"] for sample in samples)
    return f"{_nats(fmean(divergences))}{interval}, {same:.2f}{above}"


def _nats(number: float) -> str:
    """Return a KL with two significant digits, and four decimals at most."""
    return f"{number:.{3 if number >= 0.0095 else 4}f}" if number < 0.0995 else f"{number:.2f}"


def compared(result: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """Return samples of predictions with the names of their rows, by the length of their contexts. Contexts differ, so
    means need the same ones: those that every plan has finished, or, where there is none, those in which the most plans
    are finished, by these plans."""
    lengths = {file["name"]: file["max_tokens"] - file["targets"] for file in result["recipe"].get("files", ())}
    by_length: dict[int, list[dict[str, Any]]] = {}
    for sample in _named(result):
        if "kl" in sample:
            by_length.setdefault(lengths.get(sample["task"]) or sample["length"], []).append(sample)
    kept = {}
    for length, samples in sorted(by_length.items()):
        counts = Counter(sample["seed"] for sample in samples)
        most = max(counts.values())
        kept[length] = [sample for sample in samples if counts[sample["seed"]] == most]
    return kept


def budget_for(divergences: dict[int, float], target: float) -> float | None:
    """Return the tokens at which the KL of a plan falls to a target, on a line between the logarithms of budgets and
    KL; None if it does so outside of the measured budgets.

    Args:
        divergences: mean KL by budget.
        target: in nats.
    """
    points = sorted((log(budget), log(divergence)) for budget, divergence in divergences.items())
    for (fewer, far), (more, close) in pairwise(points):
        if far >= log(target) >= close:
            return exp(fewer + (more - fewer) * (far - log(target)) / (far - close)) if far > close else exp(fewer)
    return None


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return sum(values) / len(values) if values else None


def _cell(samples: Sequence[dict[str, Any]] | None) -> str:
    if not samples:
        return "-"
    scores = [sample["score"] for sample in samples]
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


def _named(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the samples with the names of their rows."""
    names = {row["plan"]: row["name"] for row in result["rows"]}
    return [{**sample, "name": names[sample["plan"]]} for sample in result["samples"]]


def _plans(result: dict[str, Any]) -> list[str]:
    """Return the names of rows in the recipe's order."""
    return list(dict.fromkeys(row["name"] for row in result["rows"]))
