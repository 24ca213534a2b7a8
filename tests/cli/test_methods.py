"""kvsift methods, doctor and --version: what there is, for people and as JSON."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cli.watched import Run
from engine.tiny_directory import write_model

from kvsift.methods import BUILT_IN, catalogue
from kvsift.plan.syntax import BUDGET_KEYS, make_rule


def test_methods_lists_the_catalogue_with_knobs_that_may_be_set(run: Run) -> None:
    outcome = run("methods", "--json")
    rows = outcome.document
    assert outcome.err == ""
    assert [row["name"] for row in rows] == list(catalogue())
    for row in rows:
        about = {"granularity", "keeps", "state_bytes_per_token", "meanings", "budget"}
        assert row.keys() == {"name", "summary", "phases", "knobs", "source", *about}
        assert row["meanings"].keys() == row["knobs"].keys()
        assert all(row["meanings"].values())
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
    shown = run("methods", "quest").out
    assert "256 bytes per token and layer besides keys and values, which take 4,096 in" in " ".join(shown.split())


def test_methods_with_a_name_says_all_about_that_one(run: Run) -> None:
    shown = run("methods", "retrieval_attention").out
    told = " ".join(shown.split())
    for words in (
        "tokens that an index of the keys finds for the query", "plan retrieval_attention:budget=740", "phases decode",
        "1,024 bytes per token and layer", "arXiv 2409.10516", "degree=32 links per key of the graph.",
        'compat "paper": a graph per query head', "budget=740 visible tokens, at most.",
        "sinks=128 first tokens", "window=512 most recent tokens",
    ):  # fmt: skip
        assert words in told
    assert "mass" not in {line.split(" ")[0] for line in shown.splitlines()}  # refused
    row = run("methods", "retrieval_attention", "--json").document
    assert (row["name"], row["budget"]["budget"], row["budget"]["window"]) == ("retrieval_attention", 740, 512)


def test_methods_with_an_unknown_name_says_the_nearest(run: Run) -> None:
    outcome = run("methods", "qest")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("kvsift: unknown method 'qest'; did you mean 'quest'? Known: critiprefill, ")


def test_the_defaults_that_methods_names_are_those_that_a_plan_gets(run: Run) -> None:
    for row in run("methods", "--json").document:
        rule = make_rule(row["name"], {})
        for key, value in row["budget"].items():
            there = getattr(rule.budget, BUDGET_KEYS[key])
            assert value == ("+".join(map(str, there)) or "none" if isinstance(there, tuple) else there)
    listed = " ".join(run("methods").out.split())
    assert "compat budget: budget=740 sinks=128 window=512 sample_attention" in listed


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package whose entry points lead nowhere, to what is no method, and to one that is."""
    there = {"broken": "my_package.nothere:Nope", "no_method": "pathlib:Path", "fine": "contracts.toy:RememberedMeans"}
    dist = SimpleNamespace(name="my-package")
    points = [SimpleNamespace(name=name, value=value, dist=dist) for name, value in there.items()]
    monkeypatch.setattr("kvsift.methods.entry_points", lambda group: points)
    catalogue.cache_clear()
    yield
    monkeypatch.undo()
    catalogue.cache_clear()


@pytest.mark.usefixtures("broken")
def test_methods_names_a_broken_plug_in_and_lists_the_others(run: Run) -> None:
    outcome = run("methods", "--json")
    names = {row["name"] for row in outcome.document}
    assert names == {*BUILT_IN, "fine"}
    warned = outcome.err.splitlines()
    assert len(warned) == 2
    assert warned[0] == (
        "kvsift: WARNING: the method 'broken' of the installed package my-package cannot be loaded: "
        "ModuleNotFoundError: No module named 'my_package'. Repair or uninstall my-package. It is skipped."
    )
    assert (
        "'no_method' of the installed package my-package cannot be loaded: TypeError: pathlib:Path is no" in warned[1]
    )
    assert run("methods").out.count("added by my-package") == 1
    described = run("methods", "fine").out
    assert re.search(r"^source +my-package$", described, re.M), "the package that the method is of, not kvsift"


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("command", [("ask", "--question", "Who?", "--plan", "broken"), ("methods", "broken")])
def test_a_plan_that_names_a_broken_plug_in_says_package_and_reason(
    run: Run, text: Path, command: tuple[str, ...]
) -> None:
    outcome = run(*command, *(("--context", text) if command[0] == "ask" else ()))
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == (
        "kvsift: the method 'broken' of the installed package my-package cannot be loaded: ModuleNotFoundError: No "
        "module named 'my_package'. Repair or uninstall my-package.\n"
    )


@pytest.fixture
def embedded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model in place of the embedded one."""
    monkeypatch.setattr("kvsift.models.hf.model_directory.embedded_model", lambda: model)


@pytest.mark.usefixtures("embedded")
def test_doctor_reports_versions_device_and_paths(run: Run, model: Path) -> None:
    outcome = run("doctor", "--device", "cpu", "--json")
    facts = outcome.document
    assert outcome.err == ""
    assert facts["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert facts["device"]["chosen"] == "cpu"
    assert (facts["model"]["path"], facts["model"]["dtype here"]) == (str(model), "float32")
    assert all(isinstance(path, str) for path in facts["path"].values())


def test_doctor_tells_what_the_layers_of_a_model_cache(run: Run, tmp_path: Path) -> None:
    """A key and a value of two heads of 16 numbers of two bytes, in one layer; in three, of the last eight tokens."""
    layers = {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
    directory = write_model(tmp_path, "Gemma3", head_dim=16, num_key_value_heads=2, sliding_window=8, **layers)
    facts = run("doctor", "--device", "cpu", "--dtype", "float16", "--json", "--model", str(directory)).document[
        "model"
    ]
    assert facts["layers"] == "1 of 4 with full attention, 3 with sliding windows"
    size = 2 * 2 * 16 * 2
    assert facts["keys and values"] == f"{size} bytes per token"
    assert facts["windows"] == f"{3 * 8 * size:,} bytes per sequence"


@pytest.mark.usefixtures("embedded")
def test_doctor_says_that_vllm_is_broken(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise OSError('libcudart.so.13 is missing')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    outcome = run("doctor", "--device", "cpu", "--json")
    assert outcome.document["vllm"] == "cannot be imported: OSError: libcudart.so.13 is missing"


@pytest.mark.usefixtures("embedded")
def test_doctor_refuses_an_unknown_device(run: Run) -> None:
    outcome = run("doctor", "--device", "gpu")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == "kvsift: unknown device 'gpu'; did you mean 'cpu'? Known: auto, cpu, cuda\n"


def test_without_a_command_there_is_help(run: Run) -> None:
    outcome = run()
    assert (outcome.code, outcome.err) == (0, "")
    assert "--install-completion" in outcome.out
    assert all(command in outcome.out for command in ("demo", "ask", "generate", "explain", "eval", "doctor"))


def test_an_interrupted_eval_says_that_its_samples_are_safe(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvsift_lab.cli.eval._load", interrupted)
    outcome = run("eval", "recipe.toml")
    assert (outcome.code, outcome.out) == (130, "")
    assert "The samples so far are safe; give the same command again to go on." in outcome.err
    monkeypatch.setattr("kvsift.cli.doctor._machine", interrupted)
    outcome = run("doctor")
    assert (outcome.code, outcome.err.strip()) == (130, "kvsift: interrupted. No file was left half written.")
