"""plan="auto": answers under the plan that was tuned for the model, wherever a plan is named."""

import logging
import shutil
from pathlib import Path

import pytest
from engine.test_exact import write_wide
from engine.tiny_directory import text_of, write_anchors
from models.gguf_files import write_gguf
from refusals import refused

from kvsift import LLM, make_cache, native, parse_plan
from kvsift.checkpoint import fingerprint
from kvsift.plan.tuned_plan import DEFAULT_PLAN, DRAFTS, FILE, GUARD, TunedPlan, default_path, write

PLAN = "quest:budget=128:window=16:dense_layers=none"
TEXT = text_of(400)


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The warnings; the user's cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.WARNING, "kvsift")
    return caplog


@pytest.fixture
def tuned(llama: Path, tmp_path: Path) -> Path:
    """A model with a tuned plan beside it."""
    return _with_plan(shutil.copytree(llama, tmp_path / "model"), PLAN)


def _with_plan(model: Path, plan: str) -> Path:
    write(model / FILE, TunedPlan(parse_plan(plan), "tiny", fingerprint(model), "cpu"))
    return model


def test_the_tuned_plan_of_a_gguf_file_is_found_wherever_the_file_is(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    made_for = fingerprint(tmp_path / "tiny.gguf")
    write(default_path(made_for, "cpu"), TunedPlan(parse_plan(PLAN), "tiny", made_for, "cpu"))
    moved = (tmp_path / "tiny.gguf").rename(tmp_path / "moved.gguf")
    llm = LLM(moved, "auto")
    assert str(llm.plan) == PLAN
    assert str(make_cache(llm.model, "auto").run.plan) == PLAN  # as a model of transformers


def test_every_way_to_name_a_plan_takes_the_tuned_one(
    tuned: Path, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    llm = LLM(tuned, "auto", chunk_size=64)
    assert str(llm.plan) == PLAN
    expected = llm.generate(TEXT, plan=PLAN, max_new_tokens=4)
    answer = llm.generate(TEXT, max_new_tokens=4)
    assert (answer.plan, answer.token_ids) == (PLAN, expected.token_ids)
    other = LLM(tuned, "dense", chunk_size=64)
    document = other.read(TEXT, plan="auto")
    answers = [
        other.generate(TEXT, plan="auto", max_new_tokens=2),
        *other.generate([TEXT, TEXT[:200]], plan=" auto ", max_new_tokens=2),
        document.ask("What does the mill grind?", max_new_tokens=2),
        other.read(TEXT).ask("What does the mill grind?", plan="auto", max_new_tokens=2),
        other.chat(TEXT, plan="auto").ask("What does the mill grind?", max_new_tokens=2),
    ]
    document.save(tmp_path / "book.kvsift")
    reopened = other.open(tmp_path / "book.kvsift", plan="auto")
    answers.append(reopened.ask("What does the mill grind?", max_new_tokens=2))
    assert [answer.plan for answer in answers] == [PLAN] * 7
    assert answers[-1].token_ids == answers[3].token_ids
    other.check([[5, 6, 7]], 2, plan="auto")
    assert not log.messages


def test_a_tuned_plan_reuses_the_selections_that_its_file_says(llama: Path, tmp_path: Path) -> None:
    model = shutil.copytree(llama, tmp_path / "model")
    anchors = write_anchors(tmp_path, LLM(model, "dense").model)
    plan = f"sketch:budget=96:window=16:anchors={anchors}:dense_layers=none"
    _with_plan(model, plan)
    expected = LLM(model, plan, chunk_size=64).generate(TEXT, max_new_tokens=4)
    anchors.unlink()
    answer = LLM(model, "auto", chunk_size=64).generate(TEXT, max_new_tokens=4)
    assert answer.token_ids == expected.token_ids
    assert answer.plan == expected.plan.replace(str(anchors), str(model / FILE))


def test_without_a_tuned_plan_the_default_with_a_guard_is_said_once(llama: Path, log: pytest.LogCaptureFixture) -> None:
    llm = LLM(llama, chunk_size=64)
    assert str(llm.plan) == DEFAULT_PLAN
    assert not log.messages
    answers = [llm.generate(TEXT[:80], plan="auto", max_new_tokens=2) for _ in range(2)]
    assert {answer.plan for answer in answers} == {f"{DEFAULT_PLAN}:{GUARD}"}
    [said] = log.messages
    assert f"kvsift tune {llama} finds a plan." in said


def test_without_probes_there_is_no_guard(llama: Path, log: pytest.LogCaptureFixture) -> None:
    assert str(LLM(llama, "auto", probe_every=0).plan) == DEFAULT_PLAN
    [said] = log.messages
    assert "without a guard (probe_every=0 checks none)" in said


@pytest.mark.skipif(not native.available(), reason="verification needs the compiled core")
def test_exact_answers_need_neither_guard_nor_dense_layers(tmp_path: Path) -> None:
    llm = LLM(write_wide(tmp_path / "wide", "Qwen3"), "auto", dtype="float32", chunk_size=64)
    assert llm.plan.is_guarded
    dense = llm.generate(TEXT, plan="dense", max_new_tokens=4)
    for answer in (llm.generate(TEXT, max_new_tokens=4, exact=True),
                   llm.generate(TEXT, plan="auto", max_new_tokens=4, exact=True)):  # fmt: skip
        assert (answer.plan, answer.token_ids) == (DRAFTS, dense.token_ids)
    assert llm.read(TEXT).ask("What does it grind?", max_new_tokens=2, exact=True).plan == DRAFTS
    with refused("unsupported_plan: min_recovery has nothing to guard"):
        llm.generate(TEXT, plan="quest:budget=128:min_recovery=0.9", exact=True)
