"""Markdown tables: every number from the samples."""

import re
from pathlib import Path
from typing import Any

import pytest
from kvsift_lab.docs import real_model
from kvsift_lab.eval.results import load_result
from kvsift_lab.eval.tables import budget_for, fidelity_table, prefill_table, quality_table, score_table

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


@pytest.fixture
def predicted() -> dict[str, Any]:
    """A result of predictions on texts of two lengths; the second context of the longer texts is not finished."""

    def sample(task: str, seed: int, plan: str, budget: int | None, kl: float) -> dict[str, Any]:
        scores = {"kl": kl, "agreement": 1 - kl, "nll": 2 + seed + kl}
        return {"task": task, "length": None, "seed": seed, "questions": 1, "plan": plan, "budget": budget, **scores}

    plans = [("sketch:budget=64", 64), ("sketch:budget=256", 256), ("quest:budget=64", 64), ("quest:budget=256", 256)]
    rows = [{"plan": plan, "name": plan.partition(":")[0]} for plan, _ in [*plans, ("dense", None)]]
    samples = [sample("short", seed, "dense", None, 0.0) for seed in (0, 1)]
    samples += [
        sample("short", seed, plan, budget, (0.16 if seed else 0.08) * 64 / budget)
        for seed in (0, 1)
        for plan, budget in plans
    ]
    samples.append(sample("short", 2, "sketch:budget=64", 64, 0.9))
    samples += [sample("long", seed, "sketch:budget=64", 64, 0.004) for seed in (0, 1)]
    files = [{"name": "long", "max_tokens": 7744, "targets": 64}, {"name": "short", "max_tokens": 1064, "targets": 64}]
    return {"recipe": {"tasks": [], "budgets": [64, 256], "files": files}, "rows": rows, "samples": samples}


def test_predictions_are_compared_over_contexts_that_all_plans_have_finished(predicted: dict[str, Any]) -> None:
    short, long = fidelity_table(predicted).split("\n\n")
    assert short == (
        "| 1,000 tokens, 2 contexts, dense NLL 2.50 | 64 | 256 |\n"
        "|---|---|---|\n"
        "| sketch | 0.12 (0.080 to 0.16), 0.88, +0.120 | 0.030 (0.020 to 0.040), 0.97, +0.030 |\n"
        "| quest | 0.12 (0.080 to 0.16), 0.88, +0.120 | 0.030 (0.020 to 0.040), 0.97, +0.030 |"
    )
    # no context is finished, and dense has not come yet: the one plan that has, in both
    assert long.splitlines()[::2] == [
        "| 7,680 tokens, 2 contexts | 64 | 256 |",
        "| sketch | 0.0040 (0.0040 to 0.0040), 1.00 | - |",
    ]


def test_a_budget_for_a_distance_is_never_extrapolated() -> None:
    measured = {128: 0.08, 512: 0.005}
    assert budget_for(measured, 0.02) == pytest.approx(256)
    assert budget_for(measured, 0.08) == pytest.approx(128)
    assert budget_for(measured, 0.1) is None
    assert budget_for(measured, 0.001) is None


def test_bytes_of_a_step_are_those_that_decode_steps_counted() -> None:
    variants = real_model.decode_variants("real-decode-sketch-512-h100")
    context = variants["dense"]["visible_tokens"]
    assert real_model.bytes_of_step("oracle_tokens", context, context) == pytest.approx(variants["dense"]["kv_bytes"])
    assert real_model.bytes_of_step("sketch", 512, context) == pytest.approx(variants["sifted"]["kv_bytes"])
    one, two = (real_model.bytes_of_step(plan, 512, context) for plan in ("sketch", "sketch:bits=2"))
    assert two - one == pytest.approx(30 * 3 * 64 / 8 * context)  # layers, KV heads, a bit for each channel
    assert real_model.bytes_of_step("streaming_llm", 512, context) is None


def test_plans_without_samples_are_named_under_the_table_of_the_real_model() -> None:
    text = real_model.tokens_for_target("real-fidelity", "fidelity")()
    assert re.search(r"\| sketch \| .* \| fewer than 128 \|", text)
    assert "| streaming_llm |" in text
    assert "more than 2,048" in text
    assert "of 4,096 tokens, no layer dense: KL to dense attention in nats" in real_model.readme_table()
