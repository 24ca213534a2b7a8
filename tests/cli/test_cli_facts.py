"""kvsift methods, doctor and --version: what there is, for people and as JSON."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cli.watched import Run

import kvsift
from kvsift.methods import catalogue
from kvsift.runtime.spec import BUDGET_KEYS, make_rule


def test_methods_lists_the_catalogue_with_knobs_that_may_be_set(run: Run) -> None:
    outcome = run("methods", "--json")
    rows = outcome.document
    assert outcome.err == ""
    assert [row["name"] for row in rows] == list(catalogue())
    for row in rows:
        assert row.keys() == {"name", "summary", "phases", "knobs", "source"}
        assert row["summary"] == catalogue()[row["name"]].summary
        assert set(row["phases"]) <= {"prefill", "decode"}
        for knob, default in row["knobs"].items():
            assert getattr(make_rule(row["name"], {knob: default}).method, knob) == default


def test_methods_shows_every_method_and_the_keys_of_every_budget(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = run("methods").out
    for name in (*catalogue(), *(f"{key}=" for key in BUDGET_KEYS)):
        assert name in shown


@pytest.fixture
def embedded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model in place of the embedded one."""
    monkeypatch.setattr("kvsift.models.transformers_load.embedded_model", lambda: model)


@pytest.mark.usefixtures("embedded")
def test_doctor_reports_versions_device_and_paths(run: Run, model: Path) -> None:
    outcome = run("doctor", "--device", "cpu", "--json")
    facts = outcome.document
    assert outcome.err == ""
    assert facts["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert facts["device"]["chosen"] == "cpu"
    assert facts["embedded model"] == {"path": str(model), "dtype here": "float32"}
    assert all(isinstance(path, str) for path in facts["path"].values())


@pytest.mark.usefixtures("embedded")
def test_doctor_shows_the_same_to_a_person(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    outcome = run("doctor", "--device", "cpu")
    assert outcome.code == 0
    assert "versions torch" in outcome.out


@pytest.mark.usefixtures("embedded")
def test_doctor_refuses_an_unknown_device(run: Run) -> None:
    outcome = run("doctor", "--device", "gpu")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == "kvsift: unknown device 'gpu'; did you mean 'cpu'? Known: auto, cpu, cuda\n"


def test_version_is_that_of_the_package(run: Run) -> None:
    outcome = run("--version")
    assert (outcome.code, outcome.out, outcome.err) == (0, f"kvsift {kvsift.__version__}\n", "")
