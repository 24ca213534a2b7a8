"""The quality table: a recipe that is checked before it runs, and numbers that all come from its samples."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from copy import deepcopy
from math import isclose
from multiprocessing import active_children
from pathlib import Path
from typing import Any, NoReturn

import pytest
from engine.tiny_directory import write_model

import kvsift.eval.quality as quality_module
from kvsift import InputError
from kvsift.eval.quality import run
from kvsift.eval.recipe import Recipe
from kvsift.eval.report import interval, prefill_table, quality_table

ROOT = Path(__file__).parents[1]
RECIPE = """
tasks = ["passkey", "key_value"]
length = 700
questions_per_task = 2
questions_per_context = 2
plans = ["dense", "quest:budget={budget}:window=16", "streaming_llm:budget={budget}"]
budgets = [64, 256]
settings = ":sinks=4:dense_layers=none"
seed = 5
"""
TASKS, BUDGETS = ("passkey", "key_value"), (64, 256)


def recipe(folder: Path, *changes: tuple[str, str], model: Path | None = None) -> Recipe:
    """The recipe above with some of its text exchanged, from a file."""
    text = RECIPE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / "recipe.toml"
    path.write_text(text + (f"model = '{model}'\n" if model else ""))
    return Recipe.load(path)


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> Iterator[None]:
    """The same paths, dtypes and words on a machine with a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


# Recipes


def test_a_recipe_is_read_as_it_is_written(tmp_path: Path) -> None:
    assert recipe(tmp_path) == Recipe(
        tasks=TASKS,
        length=700,
        questions_per_task=2,
        questions_per_context=2,
        plans=("dense", "quest:budget={budget}:window=16", "streaming_llm:budget={budget}"),
        budgets=BUDGETS,
        settings=":sinks=4:dense_layers=none",
        question_phase="decode",
        model=None,
        device="auto",
        dtype="auto",
        seed=5,
    )


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("selection*.toml")), ids=lambda path: path.stem)
def test_the_recipes_that_ship_can_be_run(path: Path) -> None:
    loaded = Recipe.load(path)
    assert list(loaded.rows())
    assert loaded.jobs()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("seed = 5", "sed = 5"), "unknown key of the recipe recipe.toml 'sed'; did you mean 'seed'? Known: budgets,"),
        (("seed = 5", "[plan]"), "unknown key of the recipe recipe.toml 'plan'; did you mean 'plans'?"),
        (("length = 700\n", ""), "the recipe recipe.toml is not complete; it lacks length."),
        ((RECIPE, "seed = 5"), "it lacks tasks, length, questions_per_task, questions_per_context, plans, budgets."),
        (("passkey", "paskey"), "unknown task 'paskey'; did you mean 'passkey'? Known: "),
        (('["passkey", "key_value"]', '"passkey"'), "tasks='passkey' of a recipe must be a list of names."),
        (('["passkey", "key_value"]', "[]"), "tasks=() of a recipe must be a list of names."),
        (('["passkey", "key_value"]', "[1]"), "tasks=(1,) of a recipe must be a list of names."),
        (("[64, 256]", "256"), "budgets=256 of a recipe must be a list of whole numbers."),
        (("[64, 256]", '["64"]'), "budgets=('64',) of a recipe must be a list of whole numbers."),
        (("[64, 256]", "[64, 32]"), "budget=32 leaves nothing to select"),
        (('"dense"', '"denes"'), "unknown method 'denes'; did you mean 'dense'?"),
        (('"dense"', '"quest:budget={bugdet}"'), "budget='{bugdet}' must be a whole number"),
        ((":sinks=4", ":sink=4"), "unknown key of quest 'sink'; did you mean 'sinks'?"),
        (("length = 700", "length = -1"), "length=-1 of a recipe must be a whole number, 1 or more."),
        (("length = 700", "length = 700.5"), "length=700.5 of a recipe must be a whole number"),
        (("questions_per_task = 2", "questions_per_task = 0"), "questions_per_task=0 of a recipe must be"),
        (("questions_per_context = 2", "questions_per_context = 0"), "questions_per_context=0 of a recipe must be"),
        (("seed = 5", "seed = true"), "seed=True of a recipe must be a whole number, 0 or more."),
        (("seed = 5", "question_phase = 'decod'"), "unknown question_phase 'decod'; did you mean 'decode'?"),
        (("seed = 5", "model = 5"), "model=5 of a recipe must be text."),
        (("seed = 5", "seed = "), "recipe.toml cannot be read: "),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        recipe(tmp_path, change)


def test_a_recipe_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the recipe .*no\.toml cannot be read: "):
        Recipe.load(tmp_path / "no.toml")


def test_a_row_per_plan_and_budget_with_the_common_settings(tmp_path: Path) -> None:
    settings = ":sinks=4:dense_layers=none"
    assert list(recipe(tmp_path).rows()) == [
        ("dense", None),
        (f"quest:budget=64:window=16{settings}", 64),
        (f"quest:budget=256:window=16{settings}", 256),
        (f"streaming_llm:budget=64{settings}", 64),
        (f"streaming_llm:budget=256{settings}", 256),
    ]


def test_contexts_are_made_until_there_are_enough_questions(tmp_path: Path) -> None:
    many = recipe(tmp_path, ("length = 700", "length = 100_000"), ("per_task = 2", "per_task = 3"))
    assert many.jobs() == [("passkey", 5), ("passkey", 6), ("passkey", 7), ("key_value", 5), ("key_value", 6)]


def test_a_context_too_short_for_its_questions_gets_company(tmp_path: Path) -> None:
    """A short context holds fewer questions than were wanted of it; there are more contexts then."""
    short = recipe(tmp_path, ("length = 700", "length = 60"))
    assert [task for task, _ in short.jobs()] == ["passkey"] * 2 + ["key_value"] * 2


# Tables


def sample(task: str, plan: str, budget: int | None, correct: bool) -> dict[str, Any]:
    return {"task": task, "plan": plan, "budget": budget, "correct": correct}


@pytest.fixture
def made_by_hand() -> dict[str, Any]:
    settings = ":sinks=4:window=16"
    quest = [sample("needle", f"quest:budget=64{settings}", 64, hit) for hit in (True, False, False)]
    quest += [sample("needle", f"quest:budget=256{settings}", 256, hit) for hit in (True, True, False)]
    mean = [sample("needle", f"quest:score_by=mean_std:budget=64{settings}", 64, hit) for hit in (True, True, True)]
    dense = [sample(task, "dense", None, hit) for task in ("needle", "facts") for hit in (True, True, False)]
    return {
        "recipe": {
            "tasks": ["needle", "facts"],
            "budgets": [64, 256],
            "settings": settings,
            "plans": ["dense", "quest:budget={budget}", "quest:score_by=mean_std:budget={budget}"],
        },
        "samples": [*quest, *dense, *mean],
    }


def test_the_table_has_a_row_per_plan_and_a_column_per_budget(made_by_hand: dict[str, Any]) -> None:
    assert quality_table(made_by_hand) == (
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
    table = quality_table({**made_by_hand, "samples": []})
    assert "needle (0 questions)" in table
    assert not re.search(r"\d\.\d|\d/\d", table)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe, Statistics in Medicine 17 (1998), table I
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
    ],
)
def test_the_interval_is_wilsons(successes: int, trials: int, low: float, high: float) -> None:
    assert interval(successes, trials) == pytest.approx((low, high), abs=5.1e-5)


def test_more_questions_narrow_the_interval_around_the_share() -> None:
    widths = []
    for trials in (8, 24, 96, 1000):
        low, high = interval(trials * 3 // 4, trials)
        assert low < 0.75 < high
        widths.append(high - low)
    assert widths == sorted(widths, reverse=True)


# A whole run, on a model that knows nothing


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def told() -> list[tuple[int, int]]:
    """What ``on_job`` was told."""
    return []


@pytest.fixture(scope="module")
def result(model: Path, told: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    loaded = recipe(tmp_path_factory.mktemp("recipes"), model=model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.cpu_count", lambda: 1)  # a thread, as in the tests: more of them add in another order
        return run(loaded, 1, lambda done, total: told.append((done, total)))


def test_a_result_says_what_made_it(result: dict[str, Any], model: Path) -> None:
    assert result["kind"] == "quality"
    assert Recipe(**{k: tuple(v) if isinstance(v, list) else v for k, v in result["recipe"].items()}).seed == 5
    assert result["recipe"]["model"] == str(model)
    assert result["versions"].keys() == {"kvsift", "python", "torch", "transformers"}
    assert re.fullmatch(r"[0-9a-f]{40}(\+changes)?|unknown", result["commit"])
    assert result["machine"]


def test_every_job_is_told_of(result: dict[str, Any], told: list[tuple[int, int]]) -> None:
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_every_question_has_a_sample_in_every_cell(result: dict[str, Any]) -> None:
    cells = {(task, plan) for task in TASKS for plan, _ in Recipe(**result["recipe"]).rows()}
    asked = dict.fromkeys(cells, 0)
    for each in result["samples"]:
        asked[each["task"], each["plan"]] += 1
    assert set(asked.values()) == {2}  # two contexts with one passkey, one context with two keys
    keys = [(each["task"], each["seed"], each["plan"], each["question"]) for each in result["samples"]]
    assert keys == sorted(set(keys))


def test_a_sample_holds_the_answer_and_what_was_read_for_it(result: dict[str, Any]) -> None:
    for each in result["samples"]:
        assert isinstance(each["correct"], bool)
        assert isinstance(each["answer"], str)
        assert each["expected"]
        assert 0 <= each["depth"] < 1
        if each["budget"] is None:
            assert (each["density"], each["recovery"], each["sparse_layer_visible_tokens"]) == (1, None, None)
        else:
            assert each["visible_tokens"] <= each["budget"]
            assert each["sparse_layer_visible_tokens"] == pytest.approx(each["visible_tokens"])
            assert each["visible_tokens"] > each["budget"] - 32  # pages of 16 leave a little over
            assert 0 < each["recovery"] <= 1


def test_the_same_recipe_gives_the_same_samples(result: dict[str, Any], model: Path, tmp_path: Path) -> None:
    again = recipe(tmp_path, model=model)
    for task, seed in again.jobs()[1::2]:
        fresh = quality_module.run_job(again, task, seed, threads=1)
        kept = [each for each in result["samples"] if (each["task"], each["seed"]) == (task, seed)]
        assert sorted(map(json.dumps, fresh)) == sorted(map(json.dumps, kept))


def test_a_result_survives_its_file(result: dict[str, Any]) -> None:
    assert quality_table(json.loads(json.dumps(result))) == quality_table(result)


def test_every_number_in_the_table_comes_from_the_samples(result: dict[str, Any]) -> None:
    changed = deepcopy(result)
    for index, each in enumerate(changed["samples"]):
        each["correct"] = index % 7 < 3  # the model knows nothing, and all scores alike would hide a mix-up
    rows = [line for line in quality_table(changed).splitlines() if "/" in line]
    settings = changed["recipe"]["settings"]
    for task, lines in zip(TASKS, (rows[:3], rows[3:]), strict=True):
        for name, line in zip(("dense", "quest", "streaming_llm"), lines, strict=True):
            title, *scores = (cell.strip() for cell in line.strip("|").split("|"))
            assert title == name
            for budget, score in zip(BUDGETS, scores, strict=True):
                window = ":window=16" if name == "quest" else ""
                plan = name if name == "dense" else f"{name}:budget={budget}{window}{settings}"
                hits = [each["correct"] for each in changed["samples"] if (each["task"], each["plan"]) == (task, plan)]
                assert score == f"{sum(hits) / len(hits):.2f} ({sum(hits)}/{len(hits)})"
                assert isclose(float(score.split()[0]), sum(hits) / len(hits), abs_tol=0.005)


def test_a_model_that_cannot_be_used_is_refused_before_workers_start(tmp_path: Path) -> None:
    def on_job(done: int, total: int) -> NoReturn:
        raise AssertionError("a job ran")

    with pytest.raises(InputError, match="is not a directory"):
        run(recipe(tmp_path, model=tmp_path / "none"), 1, on_job)


def test_contexts_that_cannot_hold_their_needles_are_refused(model: Path, tmp_path: Path) -> None:
    short = recipe(tmp_path, ("length = 700", "length = 20"), model=model)
    with pytest.raises(InputError, match=r"task 'passkey' cannot be made: .* do not fit a context of 20"):
        quality_module.run_job(short, "passkey", 5, threads=1)


def die(*args: object) -> NoReturn:
    """In place of a job: what the kernel does to a process when memory runs out."""
    os._exit(9)


def test_a_worker_that_dies_ends_the_run_with_a_reason(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality_module, "run_job", die)
    with pytest.raises(InputError, match=r"a worker died, probably for lack of memory\. 1 ran at a time; give fewer"):
        run(recipe(tmp_path, model=model), 1, lambda done, total: None)
    assert active_children() == []


PREFILL = (
    ('plans = ["dense", "quest:budget={budget}:window=16", "streaming_llm:budget={budget}"]',
     'plans = ["dense", "prefill=quoka:budget={budget}:chunk=64:window=16"]'),
    ("budgets = [64, 256]", "budgets = [128]"),
)  # fmt: skip


def test_plans_that_sift_in_prefill_read_the_context_themselves(model: Path, tmp_path: Path) -> None:
    result = run(recipe(tmp_path, *PREFILL, model=model), 1, lambda done, total: None)
    dense, sifted = ([s for s in result["samples"] if ("quoka" in s["plan"]) == whose] for whose in (False, True))
    assert {sample["prefill_visible_tokens"] for sample in dense} == {None}
    assert all(100 < sample["prefill_visible_tokens"] < 200 for sample in sifted)
    rows = prefill_table(result).splitlines()
    assert rows[0] == "| plan | passkey | key_value | all | visible tokens in prefill |"
    assert rows[2].startswith("| `dense` |")
    assert rows[2].endswith("| all |")
    assert rows[3].startswith("| `prefill=quoka:chunk=64:window=16:sinks=4` |")
    result["samples"] = [sample for sample in result["samples"] if sample["task"] == "passkey"]
    assert "key_value" not in prefill_table(result)


def test_a_run_out_of_time_keeps_what_is_done_and_lists_the_rest(model: Path, tmp_path: Path) -> None:
    others = active_children()
    wanted = recipe(tmp_path, model=model)
    result = run(wanted, 1, lambda done, total: None, 0.0)
    left = [(each["task"], each["seed"]) for each in result["left_out"]]
    assert left == wanted.jobs()
    assert result["samples"] == []
    assert active_children() == others
