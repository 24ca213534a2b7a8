"""Tuned plans: where plan=auto finds them, and what it says where it finds none."""

import json
import logging
import shutil
from pathlib import Path

import pytest
from engine.tiny_directory import write_anchors, write_model
from models.tiny import tiny
from refusals import refused

from kvsift import parse_plan
from kvsift.checkpoint import fingerprint
from kvsift.plan.tuned_plan import DEFAULT_PLAN, FILE, GUARD, ModelPlans, TunedPlan, default_path, find, read, write

PLAN = "sketch:budget=512:dense_layers=0"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def model(llama: Path, tmp_path: Path) -> Path:
    """A copy, into which a test may write."""
    return shutil.copytree(llama, tmp_path / "model")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    """An empty cache of the user, and every line of the log."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO, "kvsift")
    return tmp_path / "cache"


def _tuned(model: Path, plan: str = PLAN, device: str = "cpu") -> TunedPlan:
    return TunedPlan(parse_plan(plan), model.name, fingerprint(model), device, {"kl": 0.017})


def test_a_tuned_plan_is_found_in_the_cache(model: Path, cache: Path) -> None:
    assert find(model, "cpu") is None
    tuned = _tuned(model)
    path = default_path(tuned.fingerprint, "cpu")
    write(path, tuned)
    assert path.is_relative_to(cache / "kvsift" / "plans")
    found = find(model, "cpu")
    assert (str(found.plan), found.path, found.report) == (PLAN, path, {"kl": 0.017})
    document = json.loads(path.read_text())
    assert list(document) == ["format", "model", "device", "plan", "anchors", "kl"]
    assert (document["plan"], document["anchors"]) == (PLAN, None)


def test_the_plan_beside_the_model_comes_first(model: Path) -> None:
    write(default_path(fingerprint(model), "cpu"), _tuned(model))
    write(model / FILE, _tuned(model, "quest:budget=256"))
    found = find(model, "cpu")
    assert str(found.plan) == "quest:budget=256"


def test_the_file_can_be_moved_to_another_machine_with_its_anchors(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    anchors = write_anchors(tmp_path, tiny("Llama", num_hidden_layers=3))
    plan = f"sketch:budget=512:anchors={anchors}:dense_layers=none"
    own = tmp_path / "tuned.json"
    write(own, _tuned(model, plan))
    anchors.unlink()
    assert json.loads(own.read_text())["plan"] == "sketch:budget=512:anchors=tuned.json:dense_layers=none"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    shutil.move(own, model / FILE)
    found = find(model, "cpu")
    assert found.plan.decode.method.reused == {1: 0, 2: 0}
    assert str(found.plan) == plan.replace(str(anchors), str(model / FILE))
    write(tmp_path / "again.json", found)  # from a tuned plan
    assert json.loads((tmp_path / "again.json").read_text())["anchors"]["format"] == "kvsift anchors 1"


def test_a_file_of_another_model_is_ignored_and_named(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(model / FILE, TunedPlan(parse_plan(PLAN), "Tiny-Chat", "0" * 32, "cpu"))
    assert find(model, "cpu") is None
    [said] = caplog.messages
    assert said == f"{model / FILE} is ignored: it was tuned for another model, Tiny-Chat, or for other weights."


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "Expecting property name"),
        ("[]", "list indices must be integers"),
        ('{"format": "kvsift plan 2"}', "its format is 'kvsift plan 2', and this kvsift reads 'kvsift plan 1'"),
        ('{"format": "kvsift plan 1"}', "it has no 'model'"),
        (None, "unknown method 'qest'"),
    ],
)
def test_a_damaged_file_is_named(model: Path, caplog: pytest.LogCaptureFixture, content: str | None, why: str) -> None:
    write(default_path(fingerprint(model), "cpu"), _tuned(model))
    if content is None:
        write(model / FILE, _tuned(model))
        content = (model / FILE).read_text().replace(PLAN, "qest:budget=1")
    (model / FILE).write_text(content)
    found = find(model, "cpu")
    assert str(found.plan) == PLAN  # that of the cache
    [said] = caplog.messages
    assert said.startswith(f"{model / FILE} cannot be used as a tuned plan: ")
    assert why in said


def test_a_plan_of_the_other_device_is_taken_and_said(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(model / FILE, _tuned(model, device="cuda"))
    found = find(model, "cpu")
    assert found.device == "cuda"
    [said] = caplog.messages
    assert said == f"{model / FILE} was tuned on another device, cuda: its times are not those of this one, cpu."
    caplog.clear()
    write(default_path(fingerprint(model), "cpu"), _tuned(model, "quest:budget=256"))
    found = find(model, "cpu")
    assert str(found.plan) == "quest:budget=256"  # of this device, though another is beside the model
    assert not caplog.messages


def test_without_a_tuned_plan_auto_is_the_default_with_a_guard(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    plans = ModelPlans(model, "cpu")
    assert plans.parse("quest:budget=256") == parse_plan("quest:budget=256")
    assert not caplog.messages
    assert plans.parse("auto") == plans.parse(" auto ") == parse_plan(f"{DEFAULT_PLAN}:{GUARD}")
    [said] = caplog.messages  # once
    assert said == (
        "plan=auto: no tuned plan of this model is found. The default plan is taken with a guard: "
        f"{DEFAULT_PLAN}:{GUARD}. kvsift tune {model} finds a plan."
    )


def test_where_there_can_be_no_guard_the_default_has_none_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    plans = ModelPlans(None, "cpu", model="some-lab/Tiny", no_guard="probe_every=0 checks none")
    assert plans.auto == parse_plan(DEFAULT_PLAN)
    [said] = caplog.messages
    assert "is taken without a guard (probe_every=0 checks none): sketch:budget=1024. kvsift tune some-lab/Tiny" in said


def test_a_directory_that_has_no_whole_checkpoint_says_why_no_plan_is_looked_for(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (model / "model.safetensors").unlink()
    assert ModelPlans(model, "cpu").auto.is_guarded
    [said] = caplog.messages
    assert f"no tuned plan of this model can be looked for ({model} holds no weights" in said


def test_rules_with_different_anchors_are_not_written(model: Path, tmp_path: Path) -> None:
    anchors = write_anchors(tmp_path, tiny("Llama", num_hidden_layers=3))
    knobs = f"less_is_more:budget=512:dense_layers=none:anchors={anchors}"
    path = tmp_path / "tuned.json"
    with refused("unsupported_plan"):
        write(path, _tuned(model, f"prefill=less_is_more:budget=512,decode={knobs}"))
    write(path, _tuned(model, f"both={knobs}"))
    assert {rule.method.reused == {1: 0, 2: 0} for rule in read(path).plan.rules} == {True}


@pytest.mark.parametrize("spec", ["auto:budget=512", "decode=auto", "auto,prefill=quoka", {"decode": "auto"},
                                  {"method": "auto"}, "both=auto"])  # fmt: skip
def test_auto_is_refused_beside_other_spellings(spec: object) -> None:
    with refused("conflict: auto stands alone"):
        parse_plan(spec)  # type: ignore[arg-type]


def test_auto_alone_says_that_it_needs_a_model() -> None:
    with refused("missing_input"):
        parse_plan("auto")
