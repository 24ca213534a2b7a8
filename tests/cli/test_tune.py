"""kvsift tune: what it prints, where the plan goes, and that plan=auto takes it."""

import json
from pathlib import Path

import pytest
from cli.watched import Refused, Run
from engine.tiny_directory import text_of, write_model

from kvsift import LLM
from kvsift.cli.tune import _scored_context
from kvsift.engine.memory import predict_bytes
from kvsift.plan.syntax import parse_plan


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of its own, and fewer plans and tokens than users wait for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("kvsift.cli.tune.SCORED", 8)
    monkeypatch.setattr("kvsift.calibration.tune.METHODS", ("sketch", "quest"))
    monkeypatch.setattr("kvsift.calibration.tune.LAYERS", (":dense_layers=none",))


@pytest.fixture
def manual(tmp_path: Path) -> Path:
    path = tmp_path / "manual.txt"
    path.write_text(text_of(6000))
    return path


def test_the_plan_that_was_found_is_what_auto_takes(run: Run, model: Path, manual: Path, tmp_path: Path) -> None:
    outcome = run("tune", model, "--text", manual, "--context", 1000, "--length", 600, "--target", "kl=0.5", "--json")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    assert found["met"]
    assert found["kl"] <= found["kl_interval"][1] <= 0.5
    assert (found["context"], found["scored_context"], found["tokens"]) == (1000, 600, 128)
    plans = [each["plan"] for each in found["candidates"]]
    assert {"dense", "sketch:budget=256:dense_layers=none", "quest:budget=128:dense_layers=none"} <= {*plans}
    assert all(each["tpot_s"] > 0 for each in found["candidates"])
    assert LLM(model, "auto", device="cpu").plan == parse_plan(found["plan"])
    assert [path.name for path in (tmp_path / "cache" / "kvsift" / "plans").iterdir()] == [Path(found["file"]).name]


def test_a_plan_beside_the_model_and_the_table(run: Run, model: Path, manual: Path, tmp_path: Path) -> None:
    outcome = run("tune", model, "--text", manual, "--context", 600, "--target", "agreement=0.5", "--out", "plan.json")
    assert outcome.code == 0, outcome.err
    assert "dense" in outcome.out
    assert "bounds" in outcome.out
    assert "is in plan.json; plan=auto takes it as kvsift-plan.json beside the model." in " ".join(outcome.out.split())
    assert json.loads((tmp_path / "plan.json").read_text())["format"] == "kvsift plan 1"


@pytest.mark.parametrize("family", ["Gemma3", "GPTNeoX"])  # sliding windows; a forward pass of transformers alone
def test_models_of_other_families_are_tuned(family: str, run: Run, manual: Path, tmp_path: Path) -> None:
    directory = write_model(tmp_path / family, family, num_hidden_layers=2)
    outcome = run(
        "tune", directory, "--text", manual, "--context", 800, "--length", 600, "--target", "kl=0.9", "--json"
    )
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["kl_interval"][1] <= 0.9


def test_texts_that_come_with_kvsift_are_read_without_others(run: Run, model: Path) -> None:
    outcome = run("tune", model, "--context", 900, "--target", "recovery=0.1", "--json")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    assert found["recovery"] >= found["recovery_interval"][0] >= 0.1
    assert found["texts"] == ["prose, program text and questions"]


def test_what_cannot_be_tuned_is_refused_before_the_model_is_loaded(
    refused: Refused, model: Path, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "short.txt").write_text(text_of(550))
    assert refused("tune", model, "--target", "speed=1").startswith("the target 'speed=1' must be such as kl=0.02")
    assert "too little: 16 pieces" in refused("tune", model, "--text", "short.txt")
    assert "length is 4096 tokens" in refused("tune", model, "--context", 5000)
    assert "would replace a file" in refused("tune", model, "--text", text, "--out", text)


def test_texts_are_shorter_where_memory_is_short(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(model, device="cpu", dtype="float32")

    def need(before: int) -> int:
        return predict_bytes(llm.directory, llm.device, llm.dtype, 1000 + 16 * (before + 8), llm.chunk_size)

    for free, expected in ((None, 4096), (need(4096), 4096), (need(4096) - 1, 2048), (need(1024), 1024), (0, 512)):
        monkeypatch.setattr("kvsift.engine.memory.available_bytes", lambda device, free=free: free)
        assert _scored_context(llm, 1000) == expected


def test_states_of_all_texts_leave_less_memory_for_them(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, counted = LLM(model, device="cpu", dtype="float32", path="eager"), list[object]()
    monkeypatch.setattr("kvsift.engine.memory.unpaged_bytes", lambda *given: counted.append(given[3:5]) or 0)
    _scored_context(llm, 1000)
    assert counted == [(17, True)], "sixteen texts and the document that is timed, in captured steps"
