"""kvsift quality: a table on stdout, a result file that is whole or not there."""

from __future__ import annotations

import json
from multiprocessing import active_children
from pathlib import Path
from typing import Any, NoReturn

import pytest
from cli.watched import Refused, Run, files_in

from kvsift.eval.report import quality_table

RECIPE = """
tasks = ["passkey"]
length = 500
questions_per_task = 3
questions_per_context = 1
plans = ["dense", "quest:budget={budget}"]
budgets = [64]
settings = ":window=16"
"""


@pytest.fixture
def recipe(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(f"{RECIPE}model = '{model}'\n")
    return path


@pytest.fixture
def result(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What runs give from now on, in no time."""
    samples = [{"task": "passkey", "plan": "dense", "budget": None, "correct": hit} for hit in (True, False)]
    made = {
        "kind": "quality",
        "recipe": {"tasks": ["passkey"], "budgets": [64], "settings": "", "plans": ["dense"]},
        "samples": samples,
    }
    monkeypatch.setattr("kvsift.eval.quality.run", lambda recipe, workers, on_job, most: on_job(1, 1) or made)
    return made


def test_the_result_is_written_and_its_table_printed(
    run: Run, recipe: Path, result: dict[str, Any], tmp_path: Path
) -> None:
    outcome = run("quality", "--recipe", recipe, "--out", "result.json")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == quality_table(result) + "\n"
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert {path.name for path in tmp_path.iterdir()} == {"recipe.toml", "result.json"}


def test_json_prints_the_result_and_nothing_else(run: Run, recipe: Path, result: dict[str, Any]) -> None:
    outcome = run("quality", "--recipe", recipe, "--json")
    assert outcome.document == result
    assert outcome.err == ""


def test_an_older_result_is_replaced(run: Run, recipe: Path, result: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("older")
    assert run("quality", "--recipe", recipe, "--out", tmp_path / "result.json").code == 0
    assert json.loads((tmp_path / "result.json").read_text()) == result


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("budgets", "bugdets"), "unknown key of the recipe recipe.toml 'bugdets'; did you mean 'budgets'?"),
        (("length = 500\n", ""), "the recipe recipe.toml is not complete; it lacks length."),
        (("passkey", "paskey"), "unknown task 'paskey'; did you mean 'passkey'?"),
        (('"dense"', '"denes"'), "unknown method 'denes'; did you mean 'dense'?"),
        (("[64]", "[16]"), "budget=16 leaves nothing to select"),
        ((RECIPE, "tasks = "), "recipe.toml cannot be read: "),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(
    refused: Refused, recipe: Path, change: tuple[str, str], says: str
) -> None:
    recipe.write_text(recipe.read_text().replace(*change))
    assert says in refused("quality", "--recipe", recipe, "--out", "result.json")


def test_a_recipe_for_no_model_is_refused(refused: Refused, recipe: Path) -> None:
    recipe.write_text(RECIPE + "model = 'nowhere'\n")
    said = refused("quality", "--recipe", recipe, "--out", "result.json")
    assert said.startswith("nowhere is not a directory.")


def test_a_recipe_that_is_not_there_is_refused(refused: Refused) -> None:
    assert refused("quality", "--recipe", "no.toml").startswith("the recipe no.toml cannot be read: ")


def test_a_place_where_no_file_can_be_is_refused_before_anything_runs(
    refused: Refused, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*args: object) -> NoReturn:
        raise AssertionError("the recipe was run")

    monkeypatch.setattr("kvsift.eval.quality.run", run)
    command = ("quality", "--recipe", recipe, "--out")
    assert refused(*command, "no/result.json") == "--out no/result.json: the directory no does not exist."
    assert refused(*command, tmp_path) == f"--out {tmp_path}: no file can be written there."


def test_an_interrupted_run_leaves_the_older_result_and_no_workers(
    run: Run, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "result.json").write_text("older")
    before = files_in(tmp_path)

    def interrupt(*args: object, **kwargs: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("rich.progress.Progress.update", interrupt)  # when the first context is done
    outcome = run("quality", "--recipe", recipe, "--out", "result.json")
    assert (outcome.code, outcome.out) == (130, "")
    assert "Traceback" not in outcome.err
    assert files_in(tmp_path) == before
    assert active_children() == []


def test_a_context_that_fails_ends_the_run_in_one_line_and_no_file(run: Run, recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(recipe.read_text().replace("length = 500", "length = 5000"))
    before = files_in(tmp_path)
    outcome = run("quality", "--recipe", recipe, "--out", "result.json")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("kvsift: the prompt has ")
    assert outcome.err.count("\n") == 1
    assert files_in(tmp_path) == before
    assert active_children() == []
