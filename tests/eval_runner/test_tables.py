"""Markdown tables: every number from the samples, older result files included."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvsift import InputError
from kvsift.eval.reading import load_result, upgraded
from kvsift.eval.tables import prefill_table, quality_table, score_table

ROOT = Path(__file__).parents[2]
OLDER = [path for path in sorted((ROOT / "results").glob("*.json")) if '"kind": "quality"' in path.read_text()[:200]]


def old(task: str, plan: str, budget: int | None, correct: bool) -> dict[str, Any]:
    return {"task": task, "seed": 1, "question": 0, "plan": plan, "budget": budget, "correct": correct}


@pytest.fixture
def made_by_hand() -> dict[str, Any]:
    """As ``kvsift quality`` once wrote it."""
    settings = ":sinks=4:window=16"
    quest = [old("needle", f"quest:budget=64{settings}", 64, hit) for hit in (True, False, False)]
    quest += [old("needle", f"quest:budget=256{settings}", 256, hit) for hit in (True, True, False)]
    mean = [old("needle", f"quest:score_by=mean_std:budget=64{settings}", 64, hit) for hit in (True, True, True)]
    dense = [old(task, "dense", None, hit) for task in ("needle", "facts") for hit in (True, True, False)]
    return {
        "kind": "quality",
        "recipe": {
            "tasks": ["needle", "facts"],
            "length": 700,
            "budgets": [64, 256],
            "settings": settings,
            "plans": ["dense", "quest:budget={budget}", "quest:score_by=mean_std:budget={budget}"],
        },
        "samples": [*quest, *dense, *mean],
    }


def test_the_table_has_a_row_per_plan_and_a_column_per_budget(made_by_hand: dict[str, Any]) -> None:
    assert quality_table(upgraded(made_by_hand)) == (
        "| needle (3 questions) | 64 | 256 |\n"
        "|---|---|---|\n"
        "| dense | 0.67 (2/3) | 0.67 (2/3) |\n"
        "| quest | 0.33 (1/3) | 0.67 (2/3) |\n"
        "| quest:score_by=mean_std | 1.00 (3/3) | - |\n"
        "\n"
        "| facts (3 questions) | 64 | 256 |\n"
        "|---|---|---|\n"
        "| dense | 0.67 (2/3) | 0.67 (2/3) |\n"
        "| quest | - | - |\n"
        "| quest:score_by=mean_std | - | - |"
    )


def test_without_samples_there_are_no_scores(made_by_hand: dict[str, Any]) -> None:
    table = quality_table(upgraded({**made_by_hand, "samples": []}))
    assert "needle (0 questions)" in table
    assert not re.search(r"\d\.\d|\d/\d", table)


def test_several_lengths_have_a_table_each(made_by_hand: dict[str, Any]) -> None:
    result = upgraded(made_by_hand)
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
    assert score_table({"cells": cells, "chance": chance}, [64, 256]) == (
        "| needle at 700, 4 samples | 64 | 256 |\n"
        "|---|---|---|\n"
        "| quest | 0.75 (0.30 to 0.95, 56 tokens) | - |\n"
        "| dense | 1.00 (0.51 to 1.00, 1,700 tokens) | 1.00 (0.51 to 1.00, 1,700 tokens) |\n"
        "| chance | 0.12 | 0.12 |"
    )


@pytest.mark.parametrize("path", OLDER, ids=lambda path: path.stem)
def test_older_results_are_still_read(path: Path) -> None:
    raw, result = json.loads(path.read_text()), load_result(path)
    hits = sum(sample["correct"] for sample in raw["samples"])
    assert sum(sample["score"] for sample in result["samples"]) == hits
    assert sum(round(cell["score"] * cell["num_samples"]) for cell in result["cells"]) == hits
    first = raw["samples"][0]["task"]
    dense = sum(sample["correct"] for sample in raw["samples"] if (sample["task"], sample["plan"]) == (first, "dense"))
    if "dense" not in raw["recipe"]["plans"]:
        return
    assert f"| dense | {dense / result['cells'][0]['num_samples']:.2f} ({dense}/" in quality_table(result)


def test_prefill_tables_leave_out_what_is_the_same_everywhere() -> None:
    table = prefill_table(load_result(ROOT / "results" / "prefill-question-256-32k")).splitlines()
    assert table[0] == "| plan | needle | key_value | facts | variables | all | visible tokens in prefill |"
    assert table[2].startswith("| `dense` |")
    assert any(line.startswith("| `prefill=quoka` |") and line.endswith("| 318 |") for line in table)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "index"}'])
def test_other_files_are_no_results(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(InputError, match=r"x\.json (cannot be read|is no result of an evaluation)"):
        load_result(tmp_path / "x.json")
    with pytest.raises(InputError, match="is no results directory"):
        load_result(tmp_path)
