"""Results on disk: a summary that is read and compared, samples beside it, and both together again."""

import json
from pathlib import Path
from typing import Any

import pytest
from cli.watched import Refused
from kvsift_lab import stored
from kvsift_lab.stored import document

RESULT: dict[str, Any] = {
    "kind": "toy",
    "recipe": {"shares": [0.1, 0.2, 0.3]},
    "points": [
        {"context": 4096, "heads": [32, 8], "samples_s": [0.2, 0.1, 0.4], "tokens": list(range(40)),
         "rows": {"0": [1.5, 2]}},
        {"context": 8192, "samples_s": [0.3], "samples": [{"seconds": 1.0, "ids": [1]}, {"seconds": 3.0, "ids": [2]}]},
    ],
}  # fmt: skip


def test_what_was_stored_is_loaded(tmp_path: Path) -> None:
    stored.save(tmp_path / "folder", RESULT)
    (tmp_path / "file.json").write_text(document(RESULT))
    for name in ("folder", "file.json"):
        assert stored.load(tmp_path / name) == RESULT


def test_a_summary_has_numbers_in_place_of_samples(tmp_path: Path) -> None:
    stored.save(tmp_path / "result", RESULT)
    summary = json.loads((tmp_path / "result" / "summary.json").read_text())
    first, second = summary["points"]
    assert summary["recipe"] == RESULT["recipe"]
    assert first["samples_s"] == {"median": 0.2, "spread": 0.75, "count": 3}
    assert (first["heads"], first["tokens"]["count"]) == ([32, 8], 40)
    assert second["samples_s"] == [0.3]
    assert second["samples"] == {"count": 2, "medians": {"seconds": 2.0}}


def test_a_folder_of_other_files_is_no_place_for_a_result(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    assert "--out mine exists and is no result" in refused("bench", "attention", "--out", "mine")
    assert "the directory no does not exist" in refused("bench", "attention", "--out", "no/result")


@pytest.mark.parametrize(
    ("name", "content"),
    [("result.json", b"{"), ("result.json", b"["), ("result.json", b"\xff"), ("result.json.xz", b"no xz")],
)
def test_a_damaged_result_is_named(refused: Refused, tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert refused("bench", "chart", name, "--out", "chart.svg").startswith(f"the result {name} ")
