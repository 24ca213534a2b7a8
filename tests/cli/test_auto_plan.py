"""--plan auto: the plan that was tuned for the model, and what is said without one."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
from cli.watched import Refused, Run

from kvsift.checkpoint import fingerprint
from kvsift.plan.syntax import parse_plan
from kvsift.plan.tuned_plan import FILE, TunedPlan, write

PLAN = "quest:budget=128:window=16:dense_layers=none"


@pytest.fixture
def tuned(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with a tuned plan beside it, and a user whose cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = shutil.copytree(model, tmp_path / "tuned")
    write(copy / FILE, TunedPlan(parse_plan(PLAN), "tiny", fingerprint(copy), "cpu"))
    return copy


def test_a_tuned_plan_is_taken_by_auto_and_not_by_its_file(refused: Refused, tuned: Path, text: Path) -> None:
    command = ("ask", "--model", tuned, "--context", text, "--question", "Why?", "--plan")
    assert "--plan auto" in refused(*command, tuned / FILE)
    assert "missing.json" in refused(*command, "sketch:budget=512:anchors=missing.json")


def test_every_command_reports_the_plan_that_auto_is(
    run: Run, tuned: Path, text: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    common = "--model", tuned, "--max-new-tokens", 2, "--json"
    generated = run("generate", *common, "--plan", "auto", "--prompt-file", text)
    assert generated.document["plan"] == PLAN
    questions = "--context", text, "--question", "What is ground?"
    asked = run("ask", *common, "--plan", "dense", "--compare", "auto", *questions).document
    assert (asked["plan"], [other["plan"] for other in asked["compare"]]) == ("dense", [PLAN])
    (tuned.parent / "plan.toml").write_text('plan = "auto"')
    assert run("ask", *common, "--plan", "plan.toml", *questions).document["plan"] == PLAN
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"/plan auto\n"), "utf-8"))
    assert run("chat", tuned, "--plan", "dense").out == f"plan: {PLAN}\n"
    explained = run("explain", "--model", tuned, "--plan", "auto", "--context", text, "--question", "What?",
                    "--max-new-tokens", 1, "--methods", "none", "--json")  # fmt: skip
    assert json.loads(explained.out)["plan"] == PLAN
    assert not caplog.messages
