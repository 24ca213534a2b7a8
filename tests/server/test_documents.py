"""Documents are counted, kept in files between starts, and say how long their prefill will take."""

import os
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from kvsift.server import documents
from kvsift.server.api_errors import ApiError
from kvsift.server.document_files import DocumentFiles
from kvsift.server.documents import Documents

ME, OTHER = ("127.0.0.1", ""), ("x", "x")


def sent_by(shelf: list[dict[str, Any]], files: DocumentFiles | None = None) -> Documents:
    return Documents(shelf.append, files, ["", "key"])


def test_documents_have_a_most_and_failed_ones_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MOST_DOCUMENTS", 2)
    monkeypatch.setattr(documents, "MOST_CHARACTERS", 20)
    sent: list[dict[str, Any]] = []
    held = sent_by(sent)
    first = held.add("a", "aaaa", 4, ME)
    held.add("b", "bbbb", 4, ME)
    with pytest.raises(ApiError, match="there are 2 documents already"):
        held.add("c", "cccc", 4, ME)
    assert held.add("a", "aaaa", 4, ME) is first
    assert held.add("a", "aaaa", 4, OTHER).key != first.key
    with pytest.raises(ApiError, match="have 12 characters, of at most 20"):
        held.add("c", "c" * 9, 9, OTHER)
    assert len(sent) == 3
    held.received({"document": first.key, "status": "failed", "error": "no room", "pinned": False})
    again = held.add("a", "aaaa", 4, ME)
    assert (again.key, again.status, len(sent)) == (first.key, "reading", 4)
    assert [each.key for each in held.of(ME)][-1] == first.key


def test_the_seconds_that_are_left_follow_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("kvsift.server.served_document.monotonic", lambda: clock[0])
    document = sent_by([]).add("a", "aaaa", 4, ME)
    assert document.seconds_left is None
    document.update(tokens=1000, num_prefilled=0)
    assert document.seconds_left is None
    clock[0] = 102.0
    document.update(num_prefilled=400)
    assert document.seconds_left == 3.0
    document.update(status="ready", num_prefilled=1000)
    assert document.seconds_left == 0.0


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused("unwritable_file"):
        DocumentFiles(tmp_path / "file")


def test_a_document_that_cannot_be_written_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, content: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvsift.server.document_files.write_atomically", full)
    held = sent_by([], DocumentFiles(tmp_path))
    document = held.add("a", "aaaa", 4, ME)
    assert document.status == "reading"
    shown = document.as_dict()
    assert (shown["kept"], shown["why_not_kept"]) == (False, "the disk is full.")
    assert "is not kept: the disk is full" in capsys.readouterr().err
    monkeypatch.undo()
    shown = held.add("a", "aaaa", 4, ME).as_dict()  # there is room again
    assert (shown["kept"], shown["why_not_kept"]) == (True, None)


def test_a_document_of_a_server_without_a_folder_says_that_it_is_not_kept() -> None:
    shown = sent_by([]).add("a", "aaaa", 4, ME).as_dict()
    assert (shown["kept"], shown["why_not_kept"]) == (False, documents.NO_FOLDER)


def test_a_second_server_on_a_folder_of_documents_is_refused_and_removes_nothing(tmp_path: Path) -> None:
    first = DocumentFiles(tmp_path)
    partial = tmp_path / f"doc-{'0' * 24}.json.1-2.partial"
    partial.write_text("being written")
    with refused(f"unavailable: process {os.getpid()} on "):
        DocumentFiles(tmp_path)
    assert partial.exists()
    del first  # as the end of a process, however it comes
    DocumentFiles(tmp_path)


def test_files_of_another_form_or_name_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = DocumentFiles(tmp_path)
    document = sent_by([], files).add("ä", "Grüße 🙂\n\n", 4, ("127.0.0.1", "key"))
    path = tmp_path / f"{document.key}.json"
    assert path.stat().st_mode & 0o077 == 0
    (tmp_path / f"doc-{'0' * 24}.json").write_text('{"form": 2, "checksum": ""}\n{}')
    (tmp_path / f"doc-{'1' * 24}.json").write_text("[]")
    (tmp_path / f"doc-{'2' * 24}.json").write_bytes(b"\xff")
    (tmp_path / "doc-notes.json").write_text("{}")
    again = sent_by([], files)
    [loaded] = again.of(("elsewhere", "key"))
    assert (loaded.key, loaded.name, loaded.text) == (document.key, "ä", "Grüße 🙂\n\n")
    shown = capsys.readouterr().err
    assert Documents([].append, files, ["another"]).of(("elsewhere", "key")) == []
    assert shown.count("is left out") == 3
    assert "has form 2, and this version reads 1" in shown
    assert len(list(tmp_path.iterdir())) == 6
