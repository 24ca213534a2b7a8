"""What a result depends on, and whether two results depend on the same."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvsift.eval.recipe import Recipe
from kvsift.eval.task_files import digest

NOT_PART_OF_A_RESULT = {"device"}
MAY_GROW = {"tasks", "lengths", "plans", "budgets", "rows", "questions_per_task"}  # what is there is part of the result


def document_of(recipe: Recipe) -> dict[str, Any]:
    """What a result depends on, ready for JSON: the recipe, its rows, and what is in the files that it names."""
    digests = {file.path: digest(Path(file.path)) for file in recipe.files}
    rows = [asdict(row) for row in recipe.rows]
    document: dict[str, Any] = json.loads(json.dumps({**asdict(recipe), "rows": rows, "digests": digests}))
    return document


def fingerprint(document: dict[str, Any]) -> str:
    """Of everything that a result depends on; where it is computed is not part of it."""
    kept = {key: value for key, value in document.items() if key not in NOT_PART_OF_A_RESULT}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def asks_for_more(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether every sample of one recipe is one of the other too, which adds contexts or rows."""

    def rest(document: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in document.items() if key not in MAY_GROW | NOT_PART_OF_A_RESULT}

    more = before["questions_per_task"] <= now["questions_per_task"] and _rows(before) <= _rows(now)
    wider = all(set(before[key]) <= set(now[key]) for key in ("tasks", "lengths"))
    return rest(before) == rest(now) and more and wider


def _rows(document: dict[str, Any]) -> set[tuple[Any, ...]]:
    return {tuple(row[key] for key in ("plan", "budget", "role", "phase")) for row in document["rows"]}


def difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What changed from one recipe to another, in words."""
    keys = [key for key in dict.fromkeys([*before, *now]) if key not in NOT_PART_OF_A_RESULT | {"rows"}]
    changed = [key for key in keys if before.get(key) != now.get(key)] or ["rows"]
    words = [f"{key} is {_shown(now.get(key))} now and was {_shown(before.get(key))}" for key in changed]
    lost = _rows(before) - _rows(now)
    if changed != ["rows"] and lost:
        words.append(f"rows are lost, {min(plan for plan, *_ in lost)} among them")
    return "; ".join(words)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "..."
