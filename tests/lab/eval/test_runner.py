"""Whole runs on a model that knows nothing: complete, resumable, and the same however often they were interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any, NoReturn

import pytest
from kvsift_lab.eval import runner
from kvsift_lab.eval.recipe import EvalRecipe, Job
from kvsift_lab.eval.results import SAMPLES, load_result
from kvsift_lab.eval.runner import Meter, RunProgress, run
from lab.eval.samples import recipe_of, recipe_text
from lab.eval.samples import sample as made
from refusals import refused

TIMES = "read_s", "ttft_s", "tpot_s", "peak_memory_bytes", "session"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them add in another order, and their number follows the load of the machine."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An uninterrupted run: the folder, what was told, the result."""
    folder = tmp_path_factory.mktemp("whole")
    told: list[RunProgress] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        recipe = recipe_of(folder, model=model)
        run(recipe, recipe_text(model=model), folder / "out", on_progress=told.append)
    return {"recipe": recipe, "folder": folder / "out", "told": told, "result": load_result(folder / "out")}


def lasting(samples: list[dict[str, Any]]) -> list[str]:
    """Samples without what differs from run to run, in one order."""
    return sorted(json.dumps({k: v for k, v in sample.items() if k not in TIMES}) for sample in samples)


def key(sample: dict[str, Any]) -> tuple[Any, ...]:
    return sample["task"], sample["length"], sample["seed"], sample["plan"], sample["question"]


def test_every_question_has_a_sample_in_every_cell(whole: dict[str, Any]) -> None:
    asked: dict[tuple[str, str], int] = {}
    for sample in whole["result"]["samples"]:
        asked[sample["task"], sample["plan"]] = asked.get((sample["task"], sample["plan"]), 0) + 1
    plans = {row.plan for row in whole["recipe"].rows}
    # two contexts with one passkey, one context with two keys
    assert asked == {(task, plan): 2 for task in ("passkey", "key_value") for plan in plans}
    assert len({key(sample) for sample in whole["result"]["samples"]}) == 2 * 2 * len(plans)
    assert whole["result"]["left_out"] == []


def test_a_long_context_is_more_of_the_work_than_a_short_one() -> None:
    jobs = [Job("passkey", 1000, 0), Job("passkey", 3000, 0), Job("of_a_file", None, 0)]
    meter = Meter(jobs, num_rows=1)
    shares = [meter.add(made(task=job.task, length=job.length, seed=job.seed)).share for job in jobs]
    assert shares == pytest.approx([1 / 6, 4 / 6, 1.0])
    assert meter.progress.contexts == 3


def test_a_result_says_what_made_it(whole: dict[str, Any], model: Path) -> None:
    result = whole["result"]
    assert result["recipe"]["model"] == str(model)
    assert EvalRecipe.load(whole["folder"] / "recipe.toml") == whole["recipe"]
    (session,) = result["sessions"]
    assert session.keys() >= {"started", "seconds", "workers", "machine", "versions", "commit"}
    assert session["samples"] == len(result["samples"])
    assert json.loads((whole["folder"] / "summary.json").read_text())["cells"] == result["cells"]


def test_a_sample_holds_the_answer_and_what_was_read_for_it(whole: dict[str, Any]) -> None:
    for sample in whole["result"]["samples"]:
        assert sample["score"] in (0.0, 1.0)
        assert isinstance(sample["answer"], str)
        assert sample["expected"] in sample["references"]
        assert sample["setup"] == "question_decoded"
        assert 0 <= sample["depth"] < 1
        if sample["budget"] is None:
            assert (sample["density"], sample["recovery"], sample["sparse_layer_visible_tokens"]) == (1, None, None)
        else:
            assert sample["budget"] - 32 < sample["visible_tokens"] <= sample["budget"]  # pages of 16 leave a little
            assert sample["sparse_layer_visible_tokens"] == pytest.approx(sample["visible_tokens"])
            assert [layer for layer, *_ in sample["layers"]] == [0, 1, 2]
            assert all(0 < recovery <= 1 for *_, recovery in sample["layers"])


def test_a_finished_run_makes_nothing_twice(whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*args: object) -> NoReturn:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(runner, "run_jobs", nothing)
    before = {path.name: path.read_bytes() for path in whole["folder"].iterdir()}
    run(whole["recipe"], "", whole["folder"])
    assert {path.name: path.read_bytes() for path in whole["folder"].iterdir()} == before
    assert before.keys() == {"samples.jsonl.xz", "summary.json", "tables.md", "recipe.toml"}
    assert "| passkey at 700, 2 samples | 64 | 256 |" in before["tables.md"].decode()


def test_an_interrupted_run_goes_on_where_it_was(whole: dict[str, Any], tmp_path: Path) -> None:
    def stop(progress: RunProgress) -> None:
        if progress.contexts:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(whole["recipe"], "", tmp_path / "out", on_progress=stop)
    part = load_result(tmp_path / "out")
    assert 0 < len(part["samples"]) < len(whole["result"]["samples"])
    assert part["left_out"]
    assert active_children() == []
    with (tmp_path / "out" / SAMPLES).open("a") as file:
        file.write('{"task": "passkey", "len')  # what a kill may leave
    run(whole["recipe"], "", tmp_path / "out")
    again = load_result(tmp_path / "out")
    assert again["samples"][: len(part["samples"])] == part["samples"]
    assert lasting(again["samples"]) == lasting(whole["result"]["samples"])
    assert [session["samples"] for session in again["sessions"]] == [
        len(part["samples"]),
        len(again["samples"]) - len(part["samples"]),
    ]


def test_a_killed_process_loses_and_repeats_nothing(whole: dict[str, Any], model: Path, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(recipe_text(model=model))
    command = [sys.executable, "-m", "kvsift", "eval", "r.toml", "--out", "results", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    samples = tmp_path / "results" / "r" / SAMPLES
    for _ in _until(120):
        if samples.exists() and samples.read_bytes().count(b"\n") >= 3:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = samples.read_text().splitlines()[:3]
    run(whole["recipe"], "", samples.parent, workers=2)  # in another order, and yet the same
    again = load_result(samples.parent)
    assert [json.dumps(sample) for sample in again["samples"][:3]] == kept
    assert lasting(again["samples"]) == lasting(whole["result"]["samples"])


def _until(seconds: float) -> Iterator[None]:
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        yield
        time.sleep(0.02)
    pytest.fail("it did not happen in time")


def test_a_run_out_of_time_keeps_what_is_done_and_lists_the_rest(whole: dict[str, Any], tmp_path: Path) -> None:
    tables = run(whole["recipe"], "", tmp_path / "out", stop_at=time.monotonic())
    assert [Job(*(each[key] for key in Job._fields)) for each in tables["left_out"]] == list(whole["recipe"].jobs)
    assert load_result(tmp_path / "out")["samples"] == []
    assert active_children() == []


def test_a_model_that_cannot_be_used_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with refused("missing_file"):
        run(recipe_of(tmp_path, model=tmp_path / "none"), "", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_context_that_cannot_be_made_ends_the_run_and_keeps_the_others(model: Path, tmp_path: Path) -> None:
    short = recipe_of(tmp_path, ("[700]", "[700, 20]"), ('"passkey", "key_value"', '"passkey"'), model=model)
    with refused("input_error: 'passkey'"):
        run(short, "", tmp_path / "out")
    assert len(load_result(tmp_path / "out")["samples"]) == 5  # of the context before it
    assert active_children() == []
