"""Result files as tables. Numbers are rendered, never typed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import sqrt
from typing import Any


def quality_table(result: dict[str, Any]) -> str:
    """A Markdown table per task: a row per plan, a column per budget, exact match with counts."""
    recipe, names = result["recipe"], _names(result)
    cells: dict[tuple[str, str, int | None], list[bool]] = defaultdict(list)
    for sample in result["samples"]:
        cells[sample["task"], names[sample["plan"]], sample["budget"]].append(sample["correct"])
    plans = list(dict.fromkeys(names.values()))
    return "\n\n".join(_task_table(task, plans, recipe["budgets"], cells) for task in recipe["tasks"])


def budget_table(result: dict[str, Any], budget: int) -> str:
    """One Markdown table for one budget: a row per plan, a column per task, measured visible tokens and recovery."""
    recipe, names = result["recipe"], _names(result)
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for sample in result["samples"]:
        if sample["budget"] in (None, budget):
            rows[names[sample["plan"]]].append(sample)
    head = f"| budget {budget} | {' | '.join(recipe['tasks'])} | visible tokens | attention recovered |"
    lines = [head, "|---" * (len(recipe["tasks"]) + 3) + "|"]
    for plan in dict.fromkeys(names.values()):
        samples = rows[plan]
        tasks = [_cell([s["correct"] for s in samples if s["task"] == task]) for task in recipe["tasks"]]
        visible = _mean([s["sparse_layer_visible_tokens"] or s["visible_tokens"] for s in samples])
        recovery = _mean([s["recovery"] for s in samples if s["recovery"] is not None])
        recovered = "-" if recovery is None else f"{100 * recovery:.0f} %"
        lines.append(f"| {plan} | {' | '.join(tasks)} | {visible:,.0f} | {recovered} |")
    return "\n".join(lines)


def prefill_table(result: dict[str, Any]) -> str:
    """One Markdown table of plans that sift in prefill: a row per plan, a column per task that was asked, and how many
    tokens a prompt token saw in the layers that were not dense."""
    asked = {sample["task"] for sample in result["samples"]}
    tasks = [task for task in result["recipe"]["tasks"] if task in asked]
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for sample in result["samples"]:
        rows[sample["plan"]].append(sample)
    lines = [f"| plan | {' | '.join(tasks)} | all | visible tokens in prefill |", "|---" * (len(tasks) + 3) + "|"]
    for spec, budget in _specs(result["recipe"]):
        samples = rows[spec]
        cells = [_cell([s["correct"] for s in samples if s["task"] == task]) for task in tasks]
        cells.append(_cell([s["correct"] for s in samples]))
        visible = _mean([s["prefill_visible_tokens"] for s in samples if s["prefill_visible_tokens"]])
        name = spec if budget is None else spec.replace(f":budget={budget}", "").replace(":dense_layers=none", "")
        lines.append(f"| `{name}` | {' | '.join(cells)} | {'all' if visible is None else f'{visible:,.0f}'} |")
    return "\n".join(lines)


def _specs(recipe: dict[str, Any]) -> Iterator[tuple[str, int | None]]:
    for plan in recipe["plans"]:
        if "{budget}" not in plan:
            yield plan, None
        else:
            yield from ((plan.replace("{budget}", str(each)) + recipe["settings"], each) for each in recipe["budgets"])


RECALL_MEASURES = {
    "recall": "ten heaviest tokens seen",
    "recovery": "attention recovered",
    "overlap": "pages that {first} selects too",
    "bytes_read": "bytes read to select, of those of {first}",
}


def recall_table(result: dict[str, Any]) -> str:
    """A Markdown table per measure of a recall result: a row per plan, a column per budget, means over questions."""
    recipe, names = result["recipe"], _names(result)
    cells: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for sample in result["samples"]:
        for measure in RECALL_MEASURES:
            cells[measure, names[sample["plan"]], sample["budget"]].append(sample[measure])
    plans = list(dict.fromkeys(names.values()))
    means = {key: sum(values) / len(values) for key, values in cells.items()}
    tables = []
    for measure, title in RECALL_MEASURES.items():
        lines = [f"| {title.format(first=plans[0])} | {' | '.join(map(str, recipe['budgets']))} |"]
        lines.append("|---" * (len(recipe["budgets"]) + 1) + "|")
        for plan in plans:
            whole = {b: means[measure, plans[0], b] if measure == "bytes_read" else 1.0 for b in recipe["budgets"]}
            shares = [f"{means[measure, plan, budget] / whole[budget]:.3f}" for budget in recipe["budgets"]]
            lines.append(f"| {plan} | {' | '.join(shares)} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def interval(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    share = successes / trials
    centre = share + z * z / (2 * trials)
    spread = z * sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def _task_table(
    task: str, plans: list[str], budgets: list[int], cells: dict[tuple[str, str, int | None], list[bool]]
) -> str:
    counts = [len(scores) for (of, _, _), scores in cells.items() if of == task]
    num_questions = max(counts, default=0)
    head = f"| {task} ({num_questions} questions) | " + " | ".join(map(str, budgets)) + " |"
    lines = [head, "|---" * (len(budgets) + 1) + "|"]
    for plan in plans:
        anywhere = cells.get((task, plan, None))
        scores = [anywhere or cells.get((task, plan, budget)) for budget in budgets]
        lines.append(f"| {plan} | " + " | ".join(_cell(score) for score in scores) + " |")
    return "\n".join(lines)


def _cell(scores: list[bool] | None) -> str:
    return "-" if not scores else f"{sum(scores) / len(scores):.2f} ({sum(scores)}/{len(scores)})"


def _names(result: dict[str, Any]) -> dict[str, str]:
    """Every plan of the samples, in the recipe's order, by the name of its row: the plan without its budget, and
    without sinks and window unless the recipe compares those."""
    recipe = result["recipe"]
    settings, budgets = recipe["settings"], recipe["budgets"]
    rows = {  # plan as written in the recipe -> its row's name
        plan: ":".join(piece for piece in plan.split(":") if piece.split("=")[0] not in ("budget", "sinks", "window"))
        for plan in recipe["plans"]
    }
    if len(set(rows.values())) < len(rows):
        rows = {plan: plan for plan in rows}
    names = {}
    for plan, name in rows.items():
        for budget in budgets:
            names[plan.replace("{budget}", str(budget)) + (settings if "{budget}" in plan else "")] = name
    return names
