"""kvsift.sparse(model, "auto"): the plan that was tuned for the checkpoint from which a model was loaded."""

from pathlib import Path

import pytest
import torch
from models.tiny import logits, prompt, tiny
from refusals import refused
from transformers import AutoModelForCausalLM, PreTrainedModel

import kvsift
from kvsift.checkpoint import fingerprint
from kvsift.plan.tuned_plan import DEFAULT_PLAN, FILE, GUARD, TunedPlan, write

PLAN = "quest:budget=48:page_size=8:window=8:dense_layers=none"


@pytest.fixture(autouse=True)
def no_plans_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _saved(directory: Path) -> PreTrainedModel:
    tiny().save_pretrained(directory)
    write(directory / FILE, TunedPlan(kvsift.parse_plan(PLAN), "tiny", fingerprint(directory), "cpu"))
    return AutoModelForCausalLM.from_pretrained(directory).eval()


def test_auto_is_the_plan_beside_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = _saved(tmp_path / "model")
    with kvsift.sparse(model, "auto") as run:
        found = logits(model, prompt())
    assert run.report()["plan"] == PLAN
    cache = kvsift.make_cache(model, "auto")
    assert torch.equal(found, logits(model, prompt(), past_key_values=cache))
    assert cache.run.report()["plan"] == PLAN
    with refused("missing_input"):
        cache.replan("auto")
    assert not caplog.messages


def test_auto_is_the_plan_of_a_model_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _saved(tmp_path / "model")
    model.config.name_or_path = "some-lab/Tiny"
    asked: list[tuple[str, str, object]] = []

    def snapshot(name: str, file: str, revision: str | None) -> str:
        asked.append((name, file, revision))
        return str(tmp_path / "model" / file)

    monkeypatch.setattr("kvsift.checkpoint.try_to_load_from_cache", snapshot)
    assert kvsift.make_cache(model, "auto").run.report()["plan"] == PLAN
    assert asked == [("some-lab/Tiny", "config.json", None)]


@pytest.mark.parametrize("name", ["", "some-lab/Tiny-not-here", "/moved/away/model"])
def test_a_model_without_a_checkpoint_on_the_disk_has_the_default_with_a_guard(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny()
    model.config.name_or_path = name
    assert kvsift.make_cache(model, "auto").run.report()["plan"] == f"{DEFAULT_PLAN}:{GUARD}"
    assert kvsift.make_cache(model, "auto", probe_every=0).run.report()["plan"] == DEFAULT_PLAN
    guarded, bare = caplog.messages
    assert f"kvsift tune {name or 'MODEL'} finds a plan" in guarded
    assert "without a guard (probe_every=0 checks none)" in bare
