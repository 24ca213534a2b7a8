"""The command line as its user meets it: run in this process, in a folder whose files are watched."""

import sys
from pathlib import Path
from typing import NoReturn

import pytest
from cli.watched import Outcome, Refused, Run, files_in
from engine.fixtures import on_the_cpu  # noqa: F401
from engine.tiny_directory import text_of, write_model

from kvsift.cli.main import main
from kvsift.models.hf.model_directory import ModelDirectory


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for 4096 tokens."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 900 tokens."""
    path = tmp_path_factory.mktemp("texts") / "manual.txt"
    path.write_text(text_of(900))
    return path


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run kvsift with arguments, in ``tmp_path``."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["kvsift", *map(str, arguments)])
        capfd.readouterr()
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Outcome(code, *capfd.readouterr())

    return run


@pytest.fixture
def refused(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Refused:
    """Run kvsift, which must refuse: exit 2, one line on stderr, nothing on stdout, no weights loaded and no file
    written or changed. Gives the line without its "kvsift: "."""

    def load(*args: object) -> NoReturn:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(ModelDirectory, "load", load)

    def refused(*arguments: object) -> str:
        before = files_in(tmp_path)
        outcome = run(*arguments)
        assert outcome.code == 2
        assert outcome.out == ""
        assert outcome.err.startswith("kvsift: ")
        assert outcome.err.count("\n") == 1, outcome.err
        assert outcome.err.endswith("\n")
        assert files_in(tmp_path) == before
        return outcome.err.removeprefix("kvsift: ").rstrip("\n")

    return refused
