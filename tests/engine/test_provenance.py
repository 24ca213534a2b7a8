"""Results name the commit of kvsift that made them, or say that it is unknown."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from kvsift.engine import provenance

THERE = Path(provenance.__file__)


@pytest.fixture(autouse=True)
def unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSIFT_COMMIT", raising=False)


def commit() -> str:
    named: str = provenance.versions_and_machine(torch.device("cpu"))["commit"]
    return named


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def copied(repository: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module in a repository with one commit of something else, as pip or a person would put it there."""
    repository.mkdir()
    (repository / "theirs.txt").write_text("theirs")
    git(repository, "init", "--quiet")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "--message", "Theirs")
    file = repository / place
    file.parent.mkdir(parents=True)
    shutil.copy(THERE, file)
    monkeypatch.setattr(provenance, "__file__", str(file))
    return file


def test_a_copy_inside_another_repository_does_not_cite_that_ones_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = copied(tmp_path / "theirs", "vendored/kvsift/engine/provenance.py", monkeypatch)
    assert commit() == "unknown", "installed there"
    git(file.parent, "add", ".")
    git(file.parent, "commit", "--quiet", "--message", "Vendor kvsift")
    assert commit() == "unknown"


def test_in_its_own_repository_the_commit_is_named_with_whether_files_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = copied(tmp_path / "ours", provenance.IN_REPOSITORY, monkeypatch)
    git(tmp_path / "ours", "add", ".")
    git(tmp_path / "ours", "commit", "--quiet", "--message", "Ours")
    head = git(tmp_path / "ours", "rev-parse", "HEAD")
    assert commit() == head
    file.write_text(file.read_text() + "\n")
    assert commit() == head + "+changes"


def test_without_git_the_commit_is_unknown_unless_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert commit() == "unknown"
    monkeypatch.setenv("KVSIFT_COMMIT", "abc")
    assert commit() == "abc"
