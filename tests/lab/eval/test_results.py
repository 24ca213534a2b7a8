"""A results directory outlives kills, full disks and recipes that changed."""

import fcntl
import json
import lzma
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from kvsift_lab.eval.recipe import EvalRecipe, Job
from kvsift_lab.eval.results import ResultsDirectory, document_of, load_result, read_summary
from kvsift_lab.eval.summary import tables_of
from kvsift_lab.stored import SampleFile, compressed, whole_lines
from lab.eval.samples import recipe_of, recipe_text, sample
from refusals import refused

from kvsift.atomic_files import write_atomically


@pytest.fixture
def recipe(tmp_path: Path) -> EvalRecipe:
    return recipe_of(tmp_path)


def opened(folder: Path, recipe: EvalRecipe) -> ResultsDirectory:
    return ResultsDirectory(folder / "out", recipe, recipe_text())


def leave(folder: Path, recipe: EvalRecipe, *samples: dict[str, Any]) -> None:
    """Leave a directory with these samples, as a run that has ended."""
    results = opened(folder, recipe)
    results.write_summary({})
    for each in samples:
        results.append(each)
    results.close()


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond this, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def lines_of(folder: Path) -> list[dict[str, object]]:
    text = (folder / "out" / "samples.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_what_is_appended_is_there_when_it_is_opened_again(tmp_path: Path, recipe: EvalRecipe) -> None:
    leave(tmp_path, recipe, sample(question=0), sample(question=1))
    again = opened(tmp_path, recipe)
    assert again.samples == [sample(question=0), sample(question=1)] == lines_of(tmp_path)
    assert again.done(Job("passkey", 700, 5)) == {("dense", 0), ("dense", 1)}
    assert again.done(Job("passkey", 700, 6)) == frozenset()
    assert (tmp_path / "out" / "recipe.toml").read_text() == recipe_text()
    again.close()


def test_a_line_that_was_cut_short_is_dropped_and_the_next_one_is_whole(tmp_path: Path, recipe: EvalRecipe) -> None:
    leave(tmp_path, recipe, sample(question=0))
    with (tmp_path / "out" / "samples.jsonl").open("a") as file:
        file.write(json.dumps(sample(question=1))[:100])
    again = opened(tmp_path, recipe)
    assert again.dropped == 100
    again.append(sample(question=2))
    again.close()
    assert [line["question"] for line in lines_of(tmp_path)] == [0, 2]


@pytest.mark.parametrize("line", ["{}", "[1]", "\0\0\0\0", '{"task": '])
def test_a_whole_line_that_is_no_sample_is_named(tmp_path: Path, recipe: EvalRecipe, line: str) -> None:
    leave(tmp_path, recipe, sample())
    with (tmp_path / "out" / "samples.jsonl").open("a") as file:
        file.write(line + "\n")
    with refused("damaged_file"):
        opened(tmp_path, recipe)


def test_a_changed_recipe_is_refused_with_what_changed(tmp_path: Path, recipe: EvalRecipe) -> None:
    leave(tmp_path, recipe, sample())
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    changed = recipe_of(tmp_path, ("[64, 256]", "[64, 128]"), ("seed = 5", "seed = 6"))
    with refused("other_model"):
        opened(tmp_path, changed)
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize(
    "grown",
    [
        ("[64, 256]", "[64, 128, 256]"),
        ("[700]", "[700, 900]"),
        ("questions_per_task = 2", "questions_per_task = 9"),
        ('"dense", ', '"dense", "tova:budget={budget}:window=16", '),
        ('"key_value"]', '"key_value", "needle"]'),
    ],
    ids=["budgets", "lengths", "questions", "plans", "tasks"],
)
def test_a_recipe_that_asks_for_more_goes_on_and_a_smaller_one_does_not(
    tmp_path: Path, recipe: EvalRecipe, grown: tuple[str, str]
) -> None:
    leave(tmp_path, recipe, sample())
    larger = recipe_of(tmp_path, grown)
    second = opened(tmp_path, larger)
    assert second.done(Job.of(sample())) == {(sample()["plan"], sample()["question"])}
    second.write_summary({})
    second.close()
    opened(tmp_path, larger).close()
    with refused("other_model"):
        opened(tmp_path, recipe)


def test_a_recipe_that_grew_changes_nothing_while_another_process_writes(tmp_path: Path, recipe: EvalRecipe) -> None:
    first = opened(tmp_path, recipe)
    first.write_summary({})
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    grown = ("[64, 256]", "[64, 128, 256]")
    with refused("unavailable"):
        ResultsDirectory(tmp_path / "out", recipe_of(tmp_path, grown), recipe_text(grown))
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    first.close()
    ResultsDirectory(tmp_path / "out", recipe_of(tmp_path, grown), recipe_text(grown)).close()
    assert (tmp_path / "out" / "recipe.toml").read_text() == recipe_text(grown)


def test_a_file_that_changed_is_another_recipe(tmp_path: Path) -> None:
    data = tmp_path / "hotpotqa.jsonl"
    data.write_text("{}\n")
    files = ("seed = 5", f"seed = 5\n[[files]]\nkind = 'longbench'\npath = '{data}'")
    leave(tmp_path, recipe_of(tmp_path, files))
    data.write_text("{}\n{}\n")
    with refused("other_model: digests is"):
        opened(tmp_path, recipe_of(tmp_path, files))


def test_two_processes_do_not_write_at_once(tmp_path: Path, recipe: EvalRecipe) -> None:
    first = opened(tmp_path, recipe)
    with refused("unavailable"):
        opened(tmp_path, recipe)
    first.close()
    opened(tmp_path, recipe).close()


def test_someone_elses_samples_are_left_alone(tmp_path: Path, recipe: EvalRecipe) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "samples.jsonl").write_text("mine")
    with refused("wrong_file: samples.jsonl"):
        opened(tmp_path, recipe)
    assert (tmp_path / "out" / "samples.jsonl").read_text() == "mine"


def test_a_full_disk_leaves_whole_samples_and_says_so(tmp_path: Path, recipe: EvalRecipe) -> None:
    results = opened(tmp_path, recipe)
    results.write_summary({})
    for question in range(3):
        results.append(sample(question=question))
    size = (tmp_path / "out" / "samples.jsonl").stat().st_size
    with file_size_limit(size + 100), refused("unwritable_file: the disk is full"):
        results.append(sample(question=3))
    assert len(lines_of(tmp_path)) == 3
    results.append(sample(question=3))  # there is room again
    results.close()
    assert [line["question"] for line in lines_of(tmp_path)] == [0, 1, 2, 3]


def test_a_summary_that_has_no_room_leaves_the_older_one(tmp_path: Path, recipe: EvalRecipe) -> None:
    results = opened(tmp_path, recipe)
    results.write_summary({"cells": []})
    with file_size_limit(1000), refused("unwritable_file: the disk is full"):
        results.write_summary({"cells": ["x" * 5000]})
    results.close()
    assert read_summary(tmp_path / "out")["cells"] == []
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"samples.jsonl", "summary.json", "recipe.toml"}


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_atomically(path, "old")
    with file_size_limit(10), pytest.raises(OSError, match="File too large"):
        write_atomically(path, "new" * 100)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# finished results are compressed

OLD = [f"sample {number}" for number in range(3)]
FINISHED = {"samples.jsonl.xz", "summary.json", "tables.md", "recipe.toml"}


def compress(path: Path) -> None:
    compressed(path).write_bytes(lzma.compress(path.read_bytes()))
    path.unlink()


def text_of(lines: list[str]) -> bytes:
    return "".join(line + "\n" for line in lines).encode()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def session() -> dict[str, Any]:
    return {"commit": "abc", "versions": {}, "machine": "here"}


def whole_result(folder: Path, recipe: EvalRecipe) -> ResultsDirectory:
    """Two samples, of which its summary says that they are all."""
    results = ResultsDirectory(folder, recipe, recipe_text())
    results.sessions.append(session())
    results.append(sample(question=0))
    results.append(sample(question=1))
    results.write_summary(tables_of(document_of(recipe), results.samples, []))
    return results


def test_a_whole_result_is_packed_and_read_as_before(tmp_path: Path, recipe: EvalRecipe) -> None:
    results = whole_result(tmp_path / "out", recipe)
    before = load_result(tmp_path / "out")
    results.close()
    assert contents(tmp_path / "out").keys() == FINISHED
    assert load_result(tmp_path / "out") == before
    assert read_summary(tmp_path / "out")["cells"] == before["cells"]


def test_a_packed_result_that_grows_is_text_again_until_it_is_whole(tmp_path: Path, recipe: EvalRecipe) -> None:
    whole_result(tmp_path / "out", recipe).close()
    again = ResultsDirectory(tmp_path / "out", recipe, recipe_text())
    again.write_summary({"left_out": [1]})
    again.append(sample(question=2))
    assert contents(tmp_path / "out").keys() == {"samples.jsonl", "summary.json", "recipe.toml"}
    assert [each["question"] for each in load_everything(tmp_path / "out")] == [0, 1, 2]
    again.write_summary(tables_of(document_of(recipe), again.samples, []))
    again.close()
    assert contents(tmp_path / "out").keys() == FINISHED
    assert load_result(tmp_path / "out")["samples"] == again.samples


def load_everything(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in whole_lines(folder / "samples.jsonl").splitlines()]


@pytest.mark.parametrize(
    "plain",
    [None, b"", text_of(OLD)[:12], text_of(OLD), text_of([*OLD, "sample 3"]), text_of([*OLD, "sample 3"]) + b"sam"],
    ids=["none", "empty", "half unpacked", "not yet removed", "one more", "one more and a half"],
)
def test_whatever_a_kill_leaves_of_packing_nothing_is_lost(tmp_path: Path, plain: bytes | None) -> None:
    path = tmp_path / "samples.jsonl"
    (tmp_path / "samples.jsonl.xz").write_bytes(lzma.compress(text_of(OLD)))
    if plain is not None:
        path.write_bytes(plain)
    expected = text_of([*OLD, "sample 3"]) if plain and b"sample 3" in plain else text_of(OLD)
    assert whole_lines(path) == expected
    lines = SampleFile(path)
    assert lines.text.encode() == expected
    lines.append("new")
    lines.close()
    assert contents(tmp_path) == {"samples.jsonl": expected + b"new\n"}


STEPS = [(os, "pwrite"), (os, "fsync"), (Path, "unlink"), (Path, "replace")]


class Killed(BaseException):
    """Ends a process at one of its steps; nothing more of it runs."""


@pytest.mark.parametrize("after", range(9))
@pytest.mark.parametrize("act", ["pack", "unpack"])
def test_a_kill_at_any_step_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str, after: int
) -> None:
    path, left = tmp_path / "samples.jsonl", [after]
    path.write_bytes(text_of(OLD))
    if act == "unpack":
        compress(path)
    lines = SampleFile(path)

    def watched(really: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return really(*args, **kwargs)

        return step

    appended = False
    with monkeypatch.context() as patch, suppress(Killed):
        for owner, name in STEPS:
            patch.setattr(owner, name, watched(getattr(owner, name)))
        if act == "unpack":
            lines.append("new")
            appended = True
        lines.close(finished=True)
    with suppress(OSError):
        os.close(lines._file)  # as the end of a process does
    kept = [text_of([*OLD, "new"])] if appended else [text_of(OLD), text_of([*OLD, "new"])]
    assert whole_lines(path) in kept
    again = SampleFile(path)
    assert again.text.encode() in kept
    again.append("next")
    again.close(finished=True)
    assert whole_lines(path).endswith(b"next\n")
    assert contents(tmp_path).keys() <= {"samples.jsonl.xz", "samples.jsonl.xz.partial"}


def test_a_damaged_packed_file_is_named(tmp_path: Path, recipe: EvalRecipe) -> None:
    whole_result(tmp_path / "out", recipe).close()
    samples = tmp_path / "out" / "samples.jsonl.xz"
    samples.write_bytes(samples.read_bytes()[:-20])
    with refused("damaged_file: samples.jsonl.xz"):
        load_result(tmp_path / "out")
    with refused("damaged_file: samples.jsonl.xz"):
        ResultsDirectory(tmp_path / "out", recipe, recipe_text())


def test_a_disk_too_full_to_unpack_or_pack_keeps_what_is_there(tmp_path: Path, recipe: EvalRecipe) -> None:
    whole_result(tmp_path / "out", recipe).close()
    before = contents(tmp_path / "out")
    again = ResultsDirectory(tmp_path / "out", recipe, recipe_text())
    with file_size_limit(300), refused("unwritable_file: the disk is full"):
        again.append(sample(question=2))
    again.close()
    assert contents(tmp_path / "out") == before
    plain = whole_result(tmp_path / "plain", recipe)
    with file_size_limit(50):
        plain.close()
    assert contents(tmp_path / "plain").keys() == {"samples.jsonl", "summary.json", "tables.md", "recipe.toml"}


def test_a_process_that_came_while_another_packed_writes_to_no_removed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, really = tmp_path / "samples.jsonl", fcntl.flock
    path.write_bytes(text_of(OLD))

    def packed_just_before(file: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", really)
        compress(path)
        really(file, how)

    monkeypatch.setattr(fcntl, "flock", packed_just_before)
    lines = SampleFile(path)
    lines.append("new")
    lines.close()
    assert contents(tmp_path) == {"samples.jsonl": text_of([*OLD, "new"])}
