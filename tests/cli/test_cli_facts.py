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
        about = {"granularity", "keeps", "state_bytes_per_token"}
        assert row.keys() == {"name", "summary", "phases", "knobs", "source", *about}
        assert row["granularity"] in ("token", "page", "block")
        assert row["keeps"].removesuffix("; evict=true frees") in ("all", "hides")
        assert row["summary"] == catalogue()[row["name"]].summary
        assert set(row["phases"]) <= {"prefill", "decode"}
        for knob, default in row["knobs"].items():
            assert getattr(make_rule(row["name"], {knob: default}).method, knob) == default


def test_methods_say_what_they_hold_and_what_they_drop(run: Run) -> None:
    """For 8 KV heads of 128 numbers: a row of 2 * 128 numbers of 2 bytes for every 16 tokens; 4 bytes for the norm of a
    key; 150 codes of 2 bytes; 2 codes of a byte."""
    rows = {row["name"]: row for row in run("methods", "--json").document}
    held = {"dense": 0, "quest": 2 * 128 * 2 * 8 / 16, "quoka": 4 * 8, "magicpig": 150 * 2 * 8, "pqcache": 2 * 8}
    for name, size in held.items():
        assert rows[name]["state_bytes_per_token"] == size
    hiding = {name for name, row in rows.items() if row["keeps"].startswith("hides")}
    assert hiding == {"streaming_llm", "h2o", "tova", "snapkv"}
    assert {rows[name]["granularity"] for name in ("quest", "oracle_pages", "random")} == {"page"}
    assert rows["critiprefill"]["granularity"] == "block"
    shown = run("methods").out
    assert "which take 4,096 in a layer" in " ".join(shown.split())


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


def test_without_a_command_there_is_help(run: Run) -> None:
    outcome = run()
    assert (outcome.code, outcome.err) == (0, "")
    assert "--install-completion" in outcome.out
    assert all(command in outcome.out for command in ("demo", "ask", "generate", "explain", "eval", "doctor"))


def test_the_help_of_a_plan_has_all_its_words(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for command in ("ask", "generate", "explain", "demo"):
        assert "a TOML file with a [plan] table." in run(command, "--help").out


def test_an_interrupted_eval_says_that_its_samples_are_safe(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvsift.cli.eval._load", interrupted)
    outcome = run("eval", "recipe.toml")
    assert (outcome.code, outcome.out) == (130, "")
    assert "The samples so far are safe; give the same command again to go on." in outcome.err
    monkeypatch.setattr("kvsift.cli.doctor._versions", interrupted)
    outcome = run("doctor")
    assert (outcome.code, outcome.err.strip()) == (130, "kvsift: interrupted. No file was left half written.")
