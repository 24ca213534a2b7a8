"""The recall study: every plan meets the queries of dense attention, and its table says what the samples say."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from kvsift_lab.eval.result_files import upgraded
from kvsift_lab.eval.tables import recall_table

pytestmark = pytest.mark.slow

RECIPE = """
tasks = ["passkey"]
length = 700
questions_per_task = 1
questions_per_context = 1
device = "cpu"
dtype = "bfloat16"
references = false
plans = [
  "quest:budget={budget}",
  "quest:score_by=minmax_fp8:budget={budget}",
  "quest:prefilter=1:block_pages=4:budget={budget}",
]
budgets = [64, 690]
settings = ":sinks=4:window=16"
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("recall")
    (folder / "recipe.toml").write_text(RECIPE)
    arguments = ["-m", "kvsift_lab.studies.summary_recall", folder / "recipe.toml", folder / "result.json"]
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def test_every_cell_has_a_sample_and_its_provenance(result: dict[str, Any]) -> None:
    assert len(result["samples"]) == 6
    assert {"recipe", "commit", "versions", "machine"} <= result.keys()
    assert len({sample["steps"] for sample in result["samples"]}) == 1
    assert result["samples"][0]["steps"] >= 3


def test_cheaper_summaries_read_less_and_a_larger_budget_misses_less(result: dict[str, Any]) -> None:
    quest, large, eighth, _, blocks, all_blocks = result["samples"]
    assert eighth["bytes_read"] == quest["bytes_read"] / 2
    assert blocks["bytes_read"] < quest["bytes_read"]
    assert quest["overlap"] == large["overlap"] == all_blocks["overlap"] == 1.0
    assert blocks["overlap"] < 1.0
    assert quest["recovery"] < large["recovery"] <= 1.0
    assert quest["recall"] < large["recall"] <= 1.0


def test_the_table_holds_means_over_questions_and_bytes_as_shares() -> None:
    plans = ["quest:budget={budget}:window=16", "quest:prefilter=2:budget={budget}:window=16"]
    numbers = {"recall": 0.5, "recovery": 0.75, "overlap": 1.0}
    samples = [
        {"plan": plan.replace("{budget}", "64"), "budget": 64, **numbers, "recall": recall, "bytes_read": bytes_read}
        for plan, bytes_read in zip(plans, (400, 100))
        for recall in (0.5, 1.0)
    ]
    recipe = {"plans": plans, "budgets": [64], "settings": ""}
    table = recall_table(upgraded({"kind": "recall", "recipe": recipe, "samples": samples}))
    tables = table.split("\n\n")
    assert len(tables) == 4
    assert tables[0] == "| top-10 token recall | 64 |\n|---|---|\n| quest | 0.750 |\n| quest:prefilter=2 | 0.750 |"
    assert tables[3].endswith("| quest | 1.000 |\n| quest:prefilter=2 | 0.250 |")
    assert tables[2].startswith("| pages that quest selects too |")
