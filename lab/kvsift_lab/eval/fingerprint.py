"""Fingerprints and differences of recipes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvsift.plan.syntax import parse_plan
from kvsift_lab.eval.recipe import EvalRecipe
from kvsift_lab.eval.task_files import digest

NOT_PART_OF_A_RESULT = {"device"}
MAY_GROW = {
    "tasks",
    "lengths",
    "plans",
    "budgets",
    "rows",
    "questions_per_task",
}  # by further values


def document_of(recipe: EvalRecipe) -> dict[str, Any]:
    """Return a recipe for JSON, with its rows and the digests of its files."""
    digests = {path: digest(Path(path)) for path in [file.path for file in recipe.files] + _files_of_plans(recipe)}
    rows = [asdict(row) for row in recipe.rows]
    keys = {**asdict(recipe), "budgets": recipe.columns, "rows": rows, "digests": digests}
    document: dict[str, Any] = json.loads(json.dumps(keys))
    return document


def _files_of_plans(recipe: EvalRecipe) -> list[str]:
    plans = [parse_plan(row.plan) for row in recipe.rows]
    methods = [rule.method for plan in plans for rule in (plan.prefill, plan.decode) if rule is not None]
    named = {getattr(method, name, None) for method in methods for name in ("anchors", "calibration")}
    return sorted(str(path) for path in named if path is not None and Path(path).is_file())


def fingerprint(document: dict[str, Any]) -> str:
    """Return the digest of a recipe without its device."""
    parts = {key: value for key, value in document.items() if key not in NOT_PART_OF_A_RESULT}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def is_extended(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Return whether every sample of a recipe is one of another, which may add contexts and rows."""

    def rest(document: dict[str, Any]) -> dict[str, Any]:
        known = {path: of_file for path, of_file in document["digests"].items() if path in before["digests"]}
        kept = {key: value for key, value in document.items() if key not in MAY_GROW | NOT_PART_OF_A_RESULT}
        return kept | {"digests": known}  # those of plans were not always kept

    more = before["questions_per_task"] <= now["questions_per_task"] and _rows(before) <= _rows(now)
    wider = all(set(before[key]) <= set(now[key]) for key in ("tasks", "lengths"))
    return rest(before) == rest(now) and more and wider


def _rows(document: dict[str, Any]) -> set[tuple[Any, ...]]:
    return {tuple(row[key] for key in ("plan", "budget", "role", "phase")) for row in document["rows"]}


def difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return the changes from one recipe to another in words."""
    keys = [key for key in dict.fromkeys([*before, *now]) if key not in NOT_PART_OF_A_RESULT | {"rows"}]
    changed = [key for key in keys if before.get(key) != now.get(key)] or ["rows"]
    words = [f"{key} is {_text(now.get(key))} now and was {_text(before.get(key))}" for key in changed]
    lost = _rows(before) - _rows(now)
    if changed != ["rows"] and lost:
        words.append(f"rows are lost, {min(plan for plan, *_ in lost)} among them")
    return "; ".join(words)


def _text(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "..."
