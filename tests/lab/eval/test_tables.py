"""Markdown tables: every number from the samples, older result files included."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from kvsift_lab.eval.page import page
from kvsift_lab.eval.result_files import load_result, upgraded
from kvsift_lab.eval.tables import prefill_table, quality_table, recall_table, score_table

from kvsift import InputError

ROOT = Path(__file__).parents[3]


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
    assert score_table({"cells": cells, "chance": chance, "unsolved": []}, [64, 256]) == (
        "| needle at 700, 4 samples | 64 | 256 |\n"
        "|---|---|---|\n"
        "| quest | 0.75 (0.30 to 0.95, 56 tokens) | - |\n"
        "| dense | 1.00 (0.51 to 1.00, 1,700 tokens) | 1.00 (0.51 to 1.00, 1,700 tokens) |\n"
        "| chance | 0.12 | 0.12 |"
    )


OLD_RECIPE = {
    "tasks": ["needle", "facts"], "length": 32768, "questions_per_task": 8, "questions_per_context": 8,
    "budgets": [512, 1024], "settings": ":sinks=4", "model": None, "device": "auto", "dtype": "auto", "seed": 700000,
}  # fmt: skip
OLD_SAMPLE = {
    "seed": 700000, "question": 0, "depth": 0.042, "expected": "Amir", "answer": "Amir", "visible_tokens": 500.0,
    "density": 0.015, "recall": 0.5, "recovery": 0.7, "sparse_layer_visible_tokens": 500.0,
}  # fmt: skip
OLD_FACTS = {"commit": "a33466f", "versions": {"torch": "2.11.0"}, "machine": "NVIDIA H200"}
DECODE = "quest:budget={budget}:window=16"
PREFILL = "prefill=quoka:budget={budget}:dense_layers=none"


def older(kind: str, plan: str, keys: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """A single file as ``kvsift quality`` or the recall script wrote it, one hit in two at each budget."""
    plans = ["dense", plan] if kind == "quality" else [plan]
    rows = [(each.replace("{budget}", str(budget)) + ("" if each == "dense" else ":sinks=4"), budget)
            for each in plans for budget in ([None] if each == "dense" else OLD_RECIPE["budgets"])]  # fmt: skip
    samples = [
        {**OLD_SAMPLE, "task": task, "plan": row, "budget": budget,
         **({"correct": task == "needle"} if kind == "quality" else {"overlap": 0.5, "bytes_read": 10}), **keys}
        for row, budget in rows
        for task in OLD_RECIPE["tasks"]
    ]  # fmt: skip
    return {"kind": kind, "recipe": {**OLD_RECIPE, "plans": plans, **facts}, **OLD_FACTS, "samples": samples}


OLDER = {
    "first": older("quality", DECODE, {}),  # the question was always decoded, and the recipe did not say so
    "question decoded": older("quality", DECODE, {}, question_phase="decode"),
    "question prefilled": older("quality", PREFILL, {"prefill_visible_tokens": 512.0}, question_phase="prefill"),
    "stopped": {**older("quality", DECODE, {}), "left_out": [{"task": "facts", "seed": 700008}]},
    "recall": older("recall", DECODE, {}),
}


@pytest.mark.parametrize("name", OLDER)
def test_older_results_are_still_read(tmp_path: Path, name: str) -> None:
    raw, path = OLDER[name], tmp_path / "older.json"
    path.write_text(json.dumps(raw))
    result = load_result(path)
    assert len(result["samples"]) == len(raw["samples"])
    assert {sample["length"] for sample in result["samples"]} == {32768}
    assert result["left_out"] == raw.get("left_out", [])
    assert [row["budget"] for row in result["rows"]][-2:] == [512, 1024]
    if raw["kind"] == "recall":
        assert "| quest | 1.000 | 1.000 |" in recall_table(result)
        return
    assert result["recipe"]["setup"] == ("sparse_prefill" if "prefilled" in name else "question_decoded")
    assert {(cell["task"], cell["score"]) for cell in result["cells"]} == {("needle", 1.0), ("facts", 0.0)}
    counted = {cell["counted_tokens"] for cell in result["cells"] if cell["budget"]}
    assert counted == {512.0 if "prefilled" in name else 500.0}
    assert "| dense | 1/1 | 1/1 |" in quality_table(result)
    assert "1 contexts are not finished" in page([("older", result)]) or name != "stopped"


def test_prefill_tables_leave_out_what_is_the_same_everywhere() -> None:
    table = prefill_table(load_result(ROOT / "results" / "prefill-question-256-32k")).splitlines()
    assert table[0] == "| plan | needle | key_value | facts | variables | all | visible tokens in prefill |"
    assert table[2].startswith("| `dense` |")
    assert any(line.startswith("| `prefill=quoka` |") and line.endswith("| 318 |") for line in table)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "index"}'])
def test_other_files_are_no_results(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(InputError, match=r"x\.json (cannot be read|is not a result of an evaluation)"):
        load_result(tmp_path / "x.json")
    with pytest.raises(InputError, match="is not a results directory"):
        load_result(tmp_path)
