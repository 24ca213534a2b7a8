"""kvsift eval and report: tables on stdout, a results directory, a page; refusals that touch nothing."""

import time
from collections.abc import Iterator
from multiprocessing import active_children
from pathlib import Path
from resource import RLIMIT_FSIZE, getrlimit, setrlimit
from typing import Any, NoReturn

import pytest
from cli.watched import Refused, Run, files_in
from kvsift_lab.eval import runner
from kvsift_lab.eval.recipe import EvalRecipe
from kvsift_lab.eval.results import ResultsDirectory
from kvsift_lab.eval.runner import RunProgress
from lab.eval.samples import sample

RECIPE = """
tasks = ["passkey"]
length = 500
questions_per_task = 3
questions_per_context = 1
plans = ["dense", "quest:budget={budget}"]
budgets = [64]
settings = ":window=16"
seed = 356  # its contexts are noise: no worker has to read the prose of the running Python
"""


@pytest.fixture
def recipe(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(f"{RECIPE}model = '{model}'\n")
    return path


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What runs are asked from now on; they answer in no time."""
    asked: list[tuple[Any, ...]] = []
    cell = {"task": "passkey", "length": 500, "name": "dense", "budget": None, "num_samples": 3, "score": 1.0}
    cell |= {"low": 0.44, "high": 1.0, "counted_tokens": 510.0}
    made = {
        "cells": [cell],
        "chance": [],
        "unsolved": [],
        "warnings": ["unequal."],
        "contexts": [1, 2, 3],
        "left_out": [3],
    }

    def run(
        recipe: Any, text: str, out: Path, workers: int, stop_at: float | None, told: Any, threads: int | None
    ) -> dict[str, Any]:
        asked.append((recipe, text, out, workers, threads, stop_at))
        told(RunProgress(0, 3, 0.0, (1500, 600)))
        told(RunProgress(2, 3, 2 / 3))
        return made

    monkeypatch.setattr("kvsift_lab.eval.runner.run", run)
    return asked


def test_tables_are_printed_and_where_the_results_are(run: Run, recipe: Path, tables: list[Any]) -> None:
    outcome = run("eval", recipe, "--out", "out", "--workers", 2, "--threads", 3, "--device", "cpu")
    assert outcome.code == 0
    assert outcome.out == (
        "| passkey at 500, 3 samples | 64 |\n|---|---|\n| dense | 1.00 (0.44 to 1.00, 510 tokens) |\n\n"
        "out/mine; 1 of 3 contexts is not finished, the same command resumes. Show it with kvsift report out/mine\n"
    )
    assert outcome.err.splitlines()[-1] == "kvsift: WARNING: unequal."
    ((asked, text, *others),) = tables
    assert (asked.device, text, *others) == ("cpu", recipe.read_text(), Path("out/mine"), 2, 3, None)


def test_plans_that_keep_their_own_budget_are_named_before_they_run(run: Run, recipe: Path, tables: list[Any]) -> None:
    assert "keeps its own budget" not in run("eval", recipe).err
    recipe.write_text(recipe.read_text().replace('"dense",', '"dense", "sketch:budget=96", "quest:mass=0.9",'))
    outcome = run("eval", recipe)
    assert outcome.code == 0
    assert outcome.err.startswith("kvsift: mine: each of these plans keeps its own budget, is measured once, and ")
    assert "in every column: sketch:budget=96, quest:mass=0.9. With budget={budget} a plan" in outcome.err


def test_several_recipes_share_the_time_and_have_a_directory_each(
    run: Run, recipe: Path, tables: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "other.toml").write_text(recipe.read_text())
    before = time.monotonic()
    assert run("eval", recipe, "other.toml", "--max-seconds", 60).code == 0
    assert [out for _, _, out, *_ in tables] == [Path("results/mine"), Path("results/other")]
    first, second = (stop_at for *_, stop_at in tables)
    assert first == second
    assert before + 60 <= first <= time.monotonic() + 60


def test_a_recipe_runs_as_it_was_read_whatever_becomes_of_its_file(
    run: Run, recipe: Path, tables: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, answer = tmp_path / "other.toml", runner.run

    def changing(*arguments: Any) -> Any:
        other.unlink(missing_ok=True)
        return answer(*arguments)

    other.write_text(recipe.read_text())
    monkeypatch.setattr(runner, "run", changing)
    assert run("eval", recipe, other).code == 0
    assert [text for _, text, *_ in tables] == [recipe.read_text()] * 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("budgets", "bugdets"), "unknown key of the recipe mine.toml 'bugdets'; did you mean 'budgets'?"),
        ((RECIPE, "tasks = "), "mine.toml cannot be read: "),
        ((RECIPE, "tasks = " + "[" * 100_000), "mine.toml cannot be read: "),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(
    refused: Refused, recipe: Path, change: tuple[str, str], says: str
) -> None:
    recipe.write_text(recipe.read_text().replace(*change))
    assert says in refused("eval", recipe)


def test_a_place_where_no_directory_can_be_is_refused_before_anything_runs(
    refused: Refused, recipe: Path, tables: list[Any]
) -> None:
    said = refused("eval", recipe, "--out", recipe)
    assert said == f"--out {recipe}: no directory can be created there."
    assert tables == []


def test_an_interrupted_run_keeps_its_samples_and_leaves_no_workers(
    run: Run, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = iter(range(10))

    def interrupt(*args: object, **kwargs: object) -> None:
        if next(updates) == 1:  # the first sample; before it stands where the run began
            raise KeyboardInterrupt

    monkeypatch.setattr("rich.progress.Progress.update", interrupt)
    outcome = run("eval", recipe, "--out", "out")
    assert (outcome.code, outcome.out) == (130, "")
    assert "Traceback" not in outcome.err
    assert active_children() == []
    assert len((tmp_path / "out" / "mine" / "samples.jsonl").read_text().splitlines()) == 1
    page = run("report", "out/mine")
    assert (page.code, page.out) == (0, "report.html\n")
    assert "3 contexts are not finished" in (tmp_path / "report.html").read_text()
    changed = recipe.read_text().replace("[64]", "[128]")
    recipe.write_text(changed)
    before = files_in(tmp_path / "out")
    again = run("eval", recipe, "--out", "out")
    assert again.code == 2
    assert "out/mine holds results of another recipe: budgets is [128] now and was [64]" in again.err
    assert files_in(tmp_path / "out") == before


def test_a_context_that_fails_ends_the_run_in_one_line(run: Run, recipe: Path) -> None:
    recipe.write_text(recipe.read_text().replace("length = 500", "length = 5000"))
    outcome = run("eval", recipe)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.splitlines()[1].startswith("kvsift: This model's maximum context length is 4096 tokens. ")
    assert outcome.err.count("\n") == 2
    assert active_children() == []


def result_in(folder: Path, task: str = "passkey") -> Path:
    """A results directory with one sample."""
    path = folder / "result"
    recipe = EvalRecipe(1, 1, ("dense",), (64,), ("passkey",), (500,), references=False)
    results = ResultsDirectory(path, recipe, "")
    results.sessions.append({"started": "", "workers": 1, "commit": "0", "versions": {}, "machine": "m"})
    results.write_summary({"contexts": []})
    results.append(sample(task=task, length=500, density=1.0, visible_tokens=500.0))
    results.close()
    return path


def test_a_report_of_a_result(run: Run, tmp_path: Path) -> None:
    outcome = run("report", result_in(tmp_path), "--out", "page.html")
    assert (outcome.code, outcome.out) == (0, "page.html\n")
    assert "passkey, 500 tokens" in (tmp_path / "page.html").read_text()


def test_an_earlier_report_is_not_overwritten_silently(run: Run, refused: Refused, tmp_path: Path) -> None:
    earlier, result = tmp_path / "report.html", result_in(tmp_path)
    earlier.write_text("mine")
    said = refused("report", result)
    assert said == "report.html exists. Give --out report.html to replace it, or another name."
    assert earlier.read_text() == "mine"
    assert run("report", result, "--out", "report.html").code == 0
    assert earlier.read_text() != "mine"


def test_the_directory_that_was_given_to_eval_is_taken_by_report(run: Run, recipe: Path, tmp_path: Path) -> None:
    for name in ("b", "a"):
        results = ResultsDirectory(tmp_path / "out" / name, EvalRecipe.load(recipe), recipe.read_text())
        results.sessions.append({"started": "", "workers": 1, "commit": "0", "versions": {}, "machine": "m"})
        results.write_summary({"contexts": []})
        results.close()
    (tmp_path / "out" / "notes").mkdir()
    assert run("report", "out").code == 0
    assert "kvsift: a, b" in (tmp_path / "report.html").read_text()


def test_kvpress_folders_instead_of_a_page(run: Run, tmp_path: Path) -> None:
    outcome = run("report", result_in(tmp_path), "--kvpress", "folders")
    assert outcome.out == "folders/kvsift__500__kvsift--embedded__no_press__0.00\n"
    assert not (tmp_path / "report.html").exists()


def test_what_is_no_result_has_no_report(refused: Refused, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def page(*args: object) -> NoReturn:
        raise AssertionError("a page was made")

    monkeypatch.setattr("kvsift_lab.eval.page.page", page)
    assert "is not a results directory" in refused("report", recipe)
    assert "is not a results directory" in refused("report", ".")
    assert refused("report", result_in(recipe.parent), "--out", "no/page.html").startswith(
        "--out no/page.html: the directory"
    )


@pytest.fixture
def full_disk() -> Iterator[None]:
    """Files may have 4096 bytes, the rest has no room."""
    before = getrlimit(RLIMIT_FSIZE)
    setrlimit(RLIMIT_FSIZE, (4096, before[1]))
    yield
    setrlimit(RLIMIT_FSIZE, before)


def test_a_report_on_a_full_disk_ends_in_a_sentence_and_leaves_no_half_of_it(
    run: Run, tmp_path: Path, full_disk: None
) -> None:
    result = result_in(tmp_path)
    outcome = run("report", result, "--out", "page.html")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == (
        "kvsift: page.html is not written: the disk is full. Make room or name another place, and give the command "
        "again.\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == [result.name]


def test_samples_of_another_recipe_are_refused_in_a_sentence(run: Run, recipe: Path, tmp_path: Path) -> None:
    outcome = run("report", result_in(tmp_path, "pass\x1b[2Jkey"))
    assert outcome.code == 2
    assert outcome.err.startswith("kvsift: a sample has the task 'pass\\x1b[2Jkey', which is not")


def test_a_run_in_a_pipe_says_every_minute_how_far_it_is(
    run: Run, recipe: Path, tables: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsift_lab.cli.eval.LINE_EVERY_S", 0.0)
    assert run("eval", recipe).err.splitlines()[1] == "mine: 2 of 3 contexts (67%), about 0 seconds left"


def test_a_long_run_says_at_once_how_much_it_is_and_after_a_context_how_long(
    run: Run, recipe: Path, monkeypatch: pytest.MonkeyPatch, tables: list[Any]
) -> None:
    monkeypatch.setattr("kvsift_lab.cli.eval.monotonic", iter(range(0, 1000, 20)).__next__)
    first, second, *_ = run("eval", recipe).err.splitlines()
    assert first.startswith(
        "mine: 3 contexts to read, each under 5 plans: 1,500 tokens to prefill, and 600 to decode at most. The "
        "time that this takes is estimated after"
    )
    assert second == "mine: 2 of 3 contexts (67%), about 10 seconds left"


def test_a_recipe_whose_name_would_lead_out_of_the_results_is_refused(refused: Refused, recipe: Path) -> None:
    nameless = recipe.with_name("...toml")
    nameless.write_text(recipe.read_text())
    assert "has no name for a results directory" in refused("eval", nameless)


def test_a_name_with_escape_sequences_does_not_reach_the_terminal(run: Run, tmp_path: Path) -> None:
    outcome = run("report", result_in(tmp_path), "--out", "page\x1b[2J.html")
    assert (outcome.code, outcome.out) == (0, "page\\x1b[2J.html\n")
