"""Result files as tables. Numbers are rendered, never typed."""

from __future__ import annotations

from collections import defaultdict
from math import sqrt
from typing import Any


def quality_table(result: dict[str, Any]) -> str:
    """A Markdown table per task: a row per plan, a column per budget, exact match with counts."""
    recipe = result["recipe"]
    cells: dict[tuple[str, str, int | None], list[bool]] = defaultdict(list)
    for sample in result["samples"]:
        cells[sample["task"], _name(sample["plan"], recipe), sample["budget"]].append(sample["correct"])
    plans = list(
        dict.fromkeys(_name(plan.format(budget=0) if "{" in plan else plan, recipe) for plan in recipe["plans"])
    )
    return "\n\n".join(_task_table(task, plans, recipe["budgets"], cells) for task in recipe["tasks"])


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


def _name(plan: str, recipe: dict[str, Any]) -> str:
    """A plan without what all plans of the table share: budget and common settings."""
    kept = [piece for piece in plan.removesuffix(recipe["settings"]).split(":") if not piece.startswith("budget=")]
    return ":".join(kept)
