"""Cells are made of samples and nothing else, chance of other questions' answers, and unequal counts are said."""

from pathlib import Path
from typing import Any

import pytest
from kvsift_lab.eval.recipe import Job
from kvsift_lab.eval.results import document_of
from kvsift_lab.eval.summary import chance, tables_of, unsolved_by_dense
from kvsift_lab.eval.tables import score_table
from lab.eval.samples import recipe_of, sample

QUEST = "quest:budget=64:window=16:sinks=4:dense_layers=none"


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    return document_of(recipe_of(tmp_path))


def test_a_cell_per_task_length_plan_and_budget(document: dict[str, Any]) -> None:
    answers = [(1.0, 56.0), (0.0, 58.0), (1.0, 60.0), (1.0, 58.0)]
    samples = [
        sample(QUEST, 64, score, question=index, sparse_layer_visible_tokens=count)
        for index, (score, count) in enumerate(answers)
    ]
    samples += [sample(QUEST, 64, 0.0, length=1400), sample("dense", None, 1.0, visible_tokens=700.0)]
    cells = tables_of(document, samples, [])["cells"]
    assert [(cell["length"], cell["name"], cell["num_samples"]) for cell in cells] == [
        (700, "dense", 1),
        (700, "quest", 4),
        (1400, "quest", 1),
    ]
    quest = cells[1]
    assert (quest["score"], quest["counted_tokens"], quest["recall"], quest["tpot_s"]) == (0.75, 58.0, 0.5, 0.01)
    assert (quest["low"], quest["high"]) == pytest.approx((0.3006, 0.9544), abs=1e-4)  # Wilson's for 3 of 4
    assert cells[0]["counted_tokens"] == 700.0


def test_intervals_know_which_questions_share_a_context(document: dict[str, Any]) -> None:
    def cells_of(contexts: list[list[float]]) -> dict[str, Any]:
        samples = [
            sample(QUEST, 64, score, seed=seed, question=question, questions=len(scores))
            for seed, scores in enumerate(contexts)
            for question, score in enumerate(scores)
        ]
        return tables_of(document, samples, [])

    apart, shared = cells_of([[1.0], [1.0], [1.0], [0.0], [0.0], [0.0]]), cells_of([[1.0] * 3, [0.0] * 3])
    assert apart["design_effects"] == {"passkey": 1.0}
    assert shared["design_effects"]["passkey"] == pytest.approx(3)
    assert shared["cells"][0]["low"] < apart["cells"][0]["low"] < 0.5
    assert not apart["warnings"]
    assert not shared["warnings"]
    one = cells_of([[1.0, 0.0]])
    assert one["design_effects"] == {"passkey": None}
    assert "passkey: all questions of a plan and length share one context" in one["warnings"][0]


def test_prefill_plans_are_counted_in_prefill(tmp_path: Path) -> None:
    plan = '"prefill=quoka:budget={budget}:window=16:dense_layers=none"'
    changes = (('"dense", "quest:budget={budget}:window=16", "streaming_llm:budget={budget}"', plan),)
    document = document_of(recipe_of(tmp_path, *changes, (':dense_layers=none"', '"')))
    spec = next(row["plan"] for row in document["rows"] if row["budget"] == 64)
    made = sample(spec, 64, prefill_visible_tokens=70.0, sparse_layer_visible_tokens=None)
    assert tables_of(document, [made], [])["cells"][0]["counted_tokens"] == 70.0


def test_plans_that_skipped_nothing_are_named_with_where(document: dict[str, Any]) -> None:
    stream = "streaming_llm:budget=64:sinks=4:dense_layers=none"
    everything = {"sparse_layer_visible_tokens": None, "density": 1.0}
    samples = [
        sample("dense", None, visible_tokens=700.0, density=1.0, sparse_layer_visible_tokens=None),
        sample(QUEST, 64, **everything),
        sample(stream, 64, **everything),
        sample(QUEST, 64, length=1400, **everything),
        sample(stream, 64, length=1400),
    ]
    told = [warning for warning in tables_of(document, samples, [])["warnings"] if "skipped nothing" in warning]
    everywhere = (
        "every query saw its whole context, as under dense. Give a smaller budget, longer contexts or fewer dense "
        "layers."
    )
    assert told == [
        f"budget 64: quest, streaming_llm skipped nothing in passkey at 700: {everywhere}",
        f"budget 64: quest skipped nothing in passkey at 1,400: {everywhere}",
    ]


def test_chance_is_what_answers_to_other_questions_score() -> None:
    answers = ["A", "B", "A", "C"]
    samples = [sample(plan, None, 1.0, question=index, references=[answer])
               for index, answer in enumerate(answers) for plan in ("dense", QUEST)]  # fmt: skip
    (found,) = chance(samples)
    # of the twelve ordered pairs of different questions only the two of the As agree
    assert (found["score"], found["num_guesses"]) == (pytest.approx(2 / 12), 12)
    assert chance(samples[:1]) == []


def cell(name: str, counted: float | None, budget: int | None = 64, phase: str | None = "decode") -> dict[str, Any]:
    return {"task": "t", "length": 1, "name": name, "budget": budget, "phase": phase, "counted_tokens": counted}


def test_contexts_that_lack_samples_are_left_out(document: dict[str, Any]) -> None:
    jobs = [Job("passkey", 700, seed) for seed in (5, 6, 7)]
    whole = [sample(row["plan"], row["budget"]) for row in document["rows"]]
    part = [sample("dense", None, seed=6)]
    left = tables_of(document, [*whole, *part], jobs)["left_out"]
    assert [(each["seed"], each["samples"], each["of"]) for each in left] == [(6, 1, 5), (7, 0, None)]


def test_a_model_that_answers_nothing_right_is_said_in_warnings_and_table(document: dict[str, Any]) -> None:
    def tables(right: int, **changes: Any) -> dict[str, Any]:
        samples = [
            sample(plan, budget, float(plan == "dense" and index < right), question=index, **changes)
            for plan, budget in (("dense", None), (QUEST, 64))
            for index in range(4)
        ]
        return tables_of(document, samples, [])

    lost, solved = tables(0, references=["12"], task="passkey"), tables(3, references=["12"])
    assert lost["unsolved"] == [["passkey", 700]]
    assert lost["warnings"][0].startswith(
        "passkey at 700: dense is not measurably better than chance, so the scores there do not"
    )
    assert "Dense is not measurably better than chance here" in score_table(lost, [64])
    # all references are the same, so answers to other questions are right, too
    assert solved["unsolved"] == [["passkey", 700]]
    solved["chance"][0]["score"] = 0.25
    assert unsolved_by_dense(solved["cells"], solved["chance"]) == []
