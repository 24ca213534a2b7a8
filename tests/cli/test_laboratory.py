"""Commands of kvsift-lab, which may not be installed."""

import tomllib
from pathlib import Path

import pytest
from cli.watched import Refused, Run

from kvsift import __version__
from kvsift.cli import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def without_laboratory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "added_commands", dict)


@pytest.mark.usefixtures("without_laboratory")
@pytest.mark.parametrize("command", main.LABORATORY)
def test_a_command_of_the_laboratory_names_what_installs_it(refused: Refused, command: str) -> None:
    assert refused(command, "--help") == (
        f"kvsift {command} comes with kvsift-lab, which is not installed: pip install -e {ROOT / 'lab'}"
    )


@pytest.mark.usefixtures("without_laboratory")
def test_help_lists_what_is_installed_and_where_the_rest_is(run: Run) -> None:
    out = run("--help").out
    assert "│ demo " in out
    assert "│ eval " not in out
    assert "bench, eval, explain, report: with kvsift-lab, pip install" in " ".join(out.split())


@pytest.mark.usefixtures("without_laboratory")
def test_away_from_a_checkout_the_extra_is_named(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "__file__", "/site-packages/kvsift/cli/main.py")
    assert refused("eval", "recipe.toml").endswith("pip install 'kvsift[lab]'")


def test_the_installed_laboratory_adds_its_commands(run: Run) -> None:
    assert set(main.LABORATORY) == set(main.added_commands())
    assert "│ eval " in run("--help").out


def test_package_and_laboratory_have_one_version() -> None:
    project = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
    assert f"kvsift=={__version__}" in project["dependencies"]
