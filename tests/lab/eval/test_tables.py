"""Markdown tables: every number from the samples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from kvsift_lab.eval.results import load_result
from kvsift_lab.eval.tables import prefill_table, quality_table, score_table

ROOT = Path(__file__).parents[3]


def scored(task: str, plan: str, budget: int | None, score: float) -> dict[str, Any]:
    return {"task": task, "length": 700, "plan": plan, "budget": budget, "score": score}


@pytest.fixture
def made_by_hand() -> dict[str, Any]:
    """A result with two tasks and three plans."""
    plans = {"quest": "quest:budget={}", "quest:score_by=mean_std": "quest:score_by=mean_std:budget={}"}
    rows = [{"plan": "dense", "name": "dense"}]
    rows += [{"plan": plan.format(budget), "name": name} for name, plan in plans.items() for budget in (64, 256)]
    samples = [scored("needle", "quest:budget=64", 64, hit) for hit in (1.0, 0.0, 0.0)]
    samples += [scored("needle", "quest:budget=256", 256, hit) for hit in (1.0, 1.0, 0.0)]
    samples += [scored(task, "dense", None, hit) for task in ("needle", "facts") for hit in (1.0, 1.0, 0.0)]
    samples += [scored("needle", "quest:score_by=mean_std:budget=64", 64, 1.0)] * 3
    return {"recipe": {"tasks": ["needle", "facts"], "budgets": [64, 256]}, "rows": rows, "samples": samples}


def test_the_table_has_a_row_per_plan_and_a_column_per_budget(made_by_hand: dict[str, Any]) -> None:
    assert quality_table(made_by_hand) == (
        "| needle (3 questions) | 64 | 256 |\n"
        "|---|---|---|\n"
        "| dense | 2/3 | 2/3 |\n"
        "| quest | 1/3 | 2/3 |\n"
        "| quest:score_by=mean_std | 3/3 | - |\n"
        "\n"
        "| facts (3 questions) | 64 | 256 |\n"
        "|---|---|---|\n"
        "| dense | 2/3 | 2/3 |\n"
        "| quest | - | - |\n"
        "| quest:score_by=mean_std | - | - |"
    )


def test_without_samples_there_are_no_scores(made_by_hand: dict[str, Any]) -> None:
    table = quality_table({**made_by_hand, "samples": []})
    assert "needle (0 questions)" in table
    assert not re.search(r"\d\.\d|\d/\d", table)


def test_several_lengths_have_a_table_each(made_by_hand: dict[str, Any]) -> None:
    result = made_by_hand
    result["samples"].append({**result["samples"][0], "length": 1400, "score": 0.25})
    table = quality_table(result)
    assert "| needle at 700 (3 questions) |" in table
    assert (
        "| needle at 1,400 (1 questions) | 64 | 256 |\n|---|---|---|\n| dense | - | - |\n| quest | 0.25 (1) | - |"
        in table
    )


def test_scores_are_shown_with_interval_and_counted_tokens() -> None:
    head = {"task": "needle", "length": 700, "num_samples": 4}
    cells = [
        {**head, "name": "quest", "budget": 64, "score": 0.75, "low": 0.3, "high": 0.95, "counted_tokens": 56.0},
        {**head, "name": "dense", "budget": None, "score": 1.0, "low": 0.51, "high": 1.0, "counted_tokens": 1700.0},
    ]
    chance = [{"task": "needle", "length": 700, "score": 0.125}]
    assert score_table({"cells": cells, "chance": chance, "unsolved": []}, [64, 256]) == (
        "| needle at 700, 4 samples | 64 | 256 |\n"
        "|---|---|---|\n"
        "| quest | 0.75 (0.30 to 0.95, 56 tokens) | - |\n"
        "| dense | 1.00 (0.51 to 1.00, 1,700 tokens) | 1.00 (0.51 to 1.00, 1,700 tokens) |\n"
        "| chance | 0.12 | 0.12 |"
    )


def test_prefill_tables_leave_out_what_is_the_same_everywhere() -> None:
    table = prefill_table(load_result(ROOT / "results" / "prefill-question-256-32k")).splitlines()
    assert table[0] == "| plan | needle | key_value | facts | variables | all | visible tokens in prefill |"
    assert table[2].startswith("| `dense` |")
    assert any(line.startswith("| `prefill=quoka` |") and line.endswith("| 318 |") for line in table)
