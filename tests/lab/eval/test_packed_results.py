"""Results that are whole are packed; every reader takes both forms, and no kill loses a sample."""

from __future__ import annotations

import fcntl
import json
import lzma
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from kvsift_lab.eval import packed
from kvsift_lab.eval.append_only_file import AppendOnlyFile, whole_lines
from kvsift_lab.eval.packed import pack_large, read_stored
from kvsift_lab.eval.recipe import EvalRecipe
from kvsift_lab.eval.result_files import load_result
from kvsift_lab.eval.results import ResultsDirectory, read_summary
from kvsift_lab.eval.summary import tables_of
from lab.eval.samples import recipe_of, recipe_text, sample
from lab.eval.test_results_directory import file_size_limit

from kvsift import InputError

OLD = [f"sample {number}" for number in range(3)]


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "LARGE", 1)


@pytest.fixture
def recipe(tmp_path: Path) -> EvalRecipe:
    return recipe_of(tmp_path)


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
    results.write_summary(tables_of(results._recipe, results.samples, []))
    return results


def test_a_whole_result_is_packed_and_read_as_before(tmp_path: Path, recipe: EvalRecipe) -> None:
    results = whole_result(tmp_path / "out", recipe)
    before = load_result(tmp_path / "out")
    results.close()
    assert contents(tmp_path / "out").keys() == {"samples.jsonl.xz", "summary.json.xz", "recipe.toml"}
    assert load_result(tmp_path / "out") == before
    assert read_summary(tmp_path / "out")["cells"] == before["cells"]


def test_small_and_unfinished_results_stay_text(
    tmp_path: Path, recipe: EvalRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = whole_result(tmp_path / "part", recipe)
    results.write_summary({"left_out": [1]})
    results.close()
    monkeypatch.setattr(packed, "LARGE", 50_000)
    whole_result(tmp_path / "small", recipe).close()
    for name in ("part", "small"):
        assert contents(tmp_path / name).keys() == {"samples.jsonl", "summary.json", "recipe.toml"}


def test_a_packed_result_that_is_only_looked_at_is_not_touched(tmp_path: Path, recipe: EvalRecipe) -> None:
    whole_result(tmp_path / "out", recipe).close()
    before = contents(tmp_path / "out")
    again = ResultsDirectory(tmp_path / "out", recipe, recipe_text())
    again.write_summary(tables_of(again._recipe, again.samples, []))
    again.close()
    assert contents(tmp_path / "out") == before


def test_a_packed_result_that_grows_is_text_again_until_it_is_whole(tmp_path: Path, recipe: EvalRecipe) -> None:
    whole_result(tmp_path / "out", recipe).close()
    again = ResultsDirectory(tmp_path / "out", recipe, recipe_text())
    again.write_summary({"left_out": [1]})
    again.append(sample(question=2))
    assert contents(tmp_path / "out").keys() == {"samples.jsonl", "summary.json", "recipe.toml"}
    assert [each["question"] for each in load_everything(tmp_path / "out")] == [0, 1, 2]
    again.write_summary(tables_of(again._recipe, again.samples, []))
    again.close()
    assert contents(tmp_path / "out").keys() == {"samples.jsonl.xz", "summary.json.xz", "recipe.toml"}
    assert load_result(tmp_path / "out")["samples"] == again.samples


def load_everything(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in whole_lines(folder / "samples.jsonl").splitlines()]


def test_the_same_text_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(text_of(OLD) * 1000)
        assert pack_large(tmp_path / name)
    assert (tmp_path / "a.xz").read_bytes() == (tmp_path / "b.xz").read_bytes()


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
    lines = AppendOnlyFile(path)
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
        pack_large(path)
    lines = AppendOnlyFile(path)

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
        lines.close(whole=True)
    with suppress(OSError):
        os.close(lines._file)  # as the end of a process does
    kept = [text_of([*OLD, "new"])] if appended else [text_of(OLD), text_of([*OLD, "new"])]
    assert whole_lines(path) in kept
    again = AppendOnlyFile(path)
    assert again.text.encode() in kept
    again.append("next")
    again.close(whole=True)
    assert read_stored(path).endswith(b"next\n")
    assert contents(tmp_path).keys() <= {"samples.jsonl.xz", "samples.jsonl.xz.partial"}


def test_files_that_differ_are_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    (tmp_path / "samples.jsonl.xz").write_bytes(lzma.compress(text_of(OLD)))
    path.write_bytes(text_of(["another"]))
    before = contents(tmp_path)
    with pytest.raises(InputError, match=r"samples\.jsonl and samples\.jsonl\.xz beside it differ"):
        AppendOnlyFile(path)
    with pytest.raises(InputError, match="differ"):
        whole_lines(path)
    assert contents(tmp_path) == before


def test_a_damaged_packed_file_is_named(tmp_path: Path, recipe: EvalRecipe) -> None:
    whole_result(tmp_path / "out", recipe).close()
    samples = tmp_path / "out" / "samples.jsonl.xz"
    samples.write_bytes(samples.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"samples\.jsonl\.xz cannot be unpacked"):
        load_result(tmp_path / "out")
    with pytest.raises(InputError, match=r"samples\.jsonl\.xz cannot be unpacked"):
        ResultsDirectory(tmp_path / "out", recipe, recipe_text())


def test_a_disk_too_full_to_unpack_or_pack_keeps_what_is_there(tmp_path: Path, recipe: EvalRecipe) -> None:
    whole_result(tmp_path / "out", recipe).close()
    before = contents(tmp_path / "out")
    again = ResultsDirectory(tmp_path / "out", recipe, recipe_text())
    with file_size_limit(300), pytest.raises(InputError, match=r"the disk is full\. The 2 samples so far are safe"):
        again.append(sample(question=2))
    again.close()
    assert contents(tmp_path / "out") == before
    plain = whole_result(tmp_path / "plain", recipe)
    with file_size_limit(50):
        plain.close()
    assert contents(tmp_path / "plain").keys() == {"samples.jsonl", "summary.json", "recipe.toml"}


def test_a_process_that_came_while_another_packed_writes_to_no_removed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, really = tmp_path / "samples.jsonl", fcntl.flock
    path.write_bytes(text_of(OLD))

    def packed_just_before(file: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", really)
        pack_large(path)
        really(file, how)

    monkeypatch.setattr(fcntl, "flock", packed_just_before)
    lines = AppendOnlyFile(path)
    lines.append("new")
    lines.close()
    assert contents(tmp_path) == {"samples.jsonl": text_of([*OLD, "new"])}


def test_a_python_without_lzma_says_how_to_unpack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_bytes(text_of(OLD))
    pack_large(path)
    monkeypatch.setitem(sys.modules, "lzma", None)
    with pytest.raises(InputError, match=r"this Python has no lzma\. Unpack it: xz -d .*samples\.jsonl\.xz"):
        whole_lines(path)
    (tmp_path / "other").write_bytes(b"text")
    assert not pack_large(tmp_path / "other")
