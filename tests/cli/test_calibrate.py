"""kvsift calibrate: what it writes is what the model's keys and queries are, and methods find it; with
--layers, the tables, the file, and what is refused."""

import hashlib
import json
from pathlib import Path
from resource import RLIMIT_FSIZE, getrlimit, setrlimit
from typing import Any

import pytest
import torch
from cli.watched import Refused, Run
from engine.tiny_directory import text_of, write_model
from refusals import refused
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import kvsift
from kvsift import LLM
from kvsift.calibration.recipe import Moments, calibrate

LAYERS: list[Any] = ["calibrate", "--layers", "--out", "anchors.json", "--selected", 32, "--dense-layers", "none"]


@pytest.fixture(scope="module")
def written(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From 1200 tokens in contexts of 500."""
    out = tmp_path_factory.mktemp("calibrated") / "tiny.safetensors"
    calibrate(LLM(model, "dense"), {"manual": text_of(3000)}, out, tokens=1200, length=500)
    return out


def seen(model: Path) -> dict[str, list[Tensor]]:
    """Keys before RoPE of layer 1 in the same contexts, from the module that makes them, and after it, from a stock
    cache; [num_kv_heads, n, head_dim]."""
    llm = LLM(model, "dense", dtype="float32")
    ids = llm.tokenizer(text_of(3000))["input_ids"][:1200]
    found: dict[str, list[Tensor]] = {"before": [], "after": []}
    attention = llm.model.model.layers[1].self_attn
    keep = lambda module, args, output: found["before"].append(output[0].unflatten(-1, (2, 16)).transpose(0, 1))  # noqa: E731
    handle = attention.k_proj.register_forward_hook(keep)
    for start in range(0, 1200, 500):
        with torch.no_grad():
            cache = llm.model(input_ids=torch.tensor([ids[start : start + 500]]), use_cache=True).past_key_values
        found["after"].append(cache.layers[1].keys[0])
    handle.remove()
    return found


def explained(axes: Tensor, keys: Tensor) -> Tensor:
    """Variance along each axis, [num_kv_heads, head_dim]."""
    return (keys @ axes).var(1)


@pytest.mark.parametrize("where", ["before", "after"])
def test_axes_are_the_principal_ones_of_the_keys(where: str, written: Path, model: Path) -> None:
    keys = torch.cat(seen(model)[where], 1).float()
    axes = load_file(written)[f"keys_{where}_rope.1"]
    torch.testing.assert_close(axes.mT @ axes, torch.eye(16).expand(2, -1, -1), atol=1e-5, rtol=0)
    centred = keys - keys.mean(1, keepdim=True)
    largest = torch.linalg.svdvals(centred).square() / (keys.shape[1] - 1)  # of any orthonormal axes
    torch.testing.assert_close(explained(axes, keys), largest, rtol=1e-3, atol=1e-4)


def test_directions_are_those_of_the_singular_values() -> None:
    """Not centred: (3, 4) times 1, 2, 3 lies along (0.6, 0.8)."""
    moments = Moments()
    for size in (1.0, 2, 3):
        moments.add(torch.tensor([[[3.0, 4]]]) * size)
    torch.testing.assert_close(moments.directions(False)[0, :, 0].abs(), torch.tensor([0.6, 0.8]))
    moments = Moments()  # centred: a point far away, and what differs is y
    for y in (-1.0, 0, 1):
        moments.add(torch.tensor([[[1000.0, y]]]))
    torch.testing.assert_close(moments.directions(True)[0, :, 0].abs(), torch.tensor([0.0, 1]), atol=1e-6, rtol=0)


def test_the_file_says_what_it_was_made_from(written: Path) -> None:
    with safe_open(written, framework="pt") as file:
        about = file.metadata()
    recipe = json.loads(about["recipe"])
    assert about["recipe_sha256"] == hashlib.sha256(about["recipe"].encode()).hexdigest()
    assert recipe["texts"] == {"manual": hashlib.sha256(text_of(3000).encode()).hexdigest()}
    assert (recipe["tokens"], recipe["length"], recipe["kvsift"]) == (1200, 500, kvsift.__version__)
    assert about["model"].startswith("LlamaForCausalLM, 3 layers, 4 heads")
    kinds = ("keys_after_rope", "keys_before_rope", "queries")
    names = {f"{kind}.{layer}" for kind in kinds for layer in range(3)}
    assert set(load_file(written)) == names | {"model.sample"}


PLANS = ["loki:rank=4:budget=64:window=16", "infinigen:partial=0.25:budget=64:window=16:dense_layers=none"]


@pytest.mark.parametrize("plan", PLANS)
def test_methods_use_it_on_its_model_and_refuse_it_on_another(
    plan: str, written: Path, model: Path, tmp_path: Path
) -> None:
    calibrated = f"{plan}:calibration={written}"
    llm = LLM(model, calibrated)
    answer = llm.generate(text_of(700), max_new_tokens=4)
    assert float(answer.decode("density")) < 0.9  # of three layers loki leaves two dense
    other = LLM(write_model(tmp_path / "other", seed=9), calibrated)
    with refused("other_model"):
        other.generate(text_of(700), max_new_tokens=4)


def test_the_command_writes_one_file_and_says_so(run: Run, model: Path, text: Path, tmp_path: Path) -> None:
    outcome = run("calibrate", "--model", model, "--text", text, "--out", "axes.safetensors")
    assert outcome.code == 0
    assert outcome.out == "axes.safetensors: 3 layers of LlamaForCausalLM, from 901 tokens of text\n"
    assert [path.name for path in tmp_path.iterdir()] == ["axes.safetensors"]
    again = run("calibrate", "--model", model, "--text", text, "--text", text, "--out", "axes.safetensors", "--json")
    assert again.document["recipe"]["tokens"] == 901  # a file counts once
    plan = "loki:rank=4:budget=64:window=16:calibration=axes.safetensors"
    assert run("generate", "--model", model, "--plan", plan, "--prompt-file", text, "--max-new-tokens", 2).code == 0


def test_a_calibration_on_a_full_disk_ends_in_a_sentence_and_leaves_no_half_of_it(
    run: Run, model: Path, text: Path, tmp_path: Path
) -> None:
    before = getrlimit(RLIMIT_FSIZE)
    setrlimit(RLIMIT_FSIZE, (4096, before[1]))
    try:
        outcome = run("calibrate", "--model", model, "--text", text, "--out", "axes.safetensors")
    finally:
        setrlimit(RLIMIT_FSIZE, before)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("kvsift: axes.safetensors is not written: ")
    assert outcome.err.endswith("Make room or name another place, and give the command again.\n")
    assert list(tmp_path.iterdir()) == []


def test_others_may_read_what_is_calibrated_as_they_may_read_other_files(
    run: Run, model: Path, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").touch()
    run("calibrate", "--model", model, "--text", text, "--tokens", 600, "--out", "axes.safetensors")
    assert (tmp_path / "axes.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_without_a_text_it_reads_prose_of_ours(run: Run, model: Path) -> None:
    options: list[Any] = ["--model", model, "--tokens", 600, "--length", 200, "--out", "axes.safetensors", "--json"]
    first, second = run("calibrate", *options).document, run("calibrate", *options).document
    assert first == second
    assert list(first["recipe"]["texts"]) == ["prose"]
    assert first["recipe"]["tokens"] == 600


def test_what_cannot_be_done_is_refused(refused: Refused, model: Path, text: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.txt"
    few.write_text("A few words.")
    out = ["--out", "axes.safetensors"]
    assert "at least 512" in refused("calibrate", "--model", model, "--text", few, *out)
    assert "does not exist" in refused("calibrate", "--model", model, "--text", "nowhere.txt", *out)
    assert "no file can be written" in refused("calibrate", "--model", model, "--text", text, "--out", tmp_path)
    assert "length is 4096 tokens" in refused("calibrate", "--model", model, "--tokens", 9000, "--length", 9000, *out)


def test_layers_prints_what_numbers_of_anchors_recover_and_writes_a_file(
    run: Run, model: Path, text: Path, tmp_path: Path
) -> None:
    outcome = run(*LAYERS, "--model", model, "--text", text, "--anchors", 2)
    assert outcome.code == 0, outcome.err
    assert "0, 1, 2" in outcome.out
    assert "layers that reuse a selection" in outcome.out
    assert outcome.out.endswith("anchors.json: 2 of 3 layers select, from 128 decoded tokens\n")
    assert [path.name for path in tmp_path.iterdir()] == ["anchors.json"]
    plan = "tidal_decode:budget=64:anchors=anchors.json:window=16:dense_layers=none"
    assert run("generate", "--model", model, "--plan", plan, "--prompt-file", text, "--max-new-tokens", 2).code == 0
    report = run("generate", "--model", model, "--plan", plan, "--prompt-file", text, "--max-new-tokens", 2, "--json")
    assert report.document["plan"] == plan


def test_as_few_layers_select_as_the_least_recovery_allows(run: Run, model: Path, text: Path) -> None:
    facts = [
        run(*LAYERS, "--model", model, "--text", text, "--min-recovery", least, "--json").document
        for least in (0, 0.9999)
    ]
    assert [each["anchors"] for each in facts] == [[0], [0, 1, 2]]
    assert facts[1]["reuse"] == {}
    assert facts[0]["least_recovery"] == min(one["recovery"] for one in facts[0]["reuse"].values())


@pytest.mark.parametrize("option", ["--anchors 2", "--min-recovery 0.5", "--selected 9", "--dense-layers 0"])
def test_options_of_layers_alone_are_refused_without_it(option: str, refused: Refused, model: Path) -> None:
    out = refused("calibrate", "--model", model, "--out", "axes.safetensors", *option.split())
    assert out == f"{option.split()[0]} is an option of --layers; add that, or leave it out."


def test_what_contradicts_itself_is_refused(refused: Refused, model: Path) -> None:
    layers = [*LAYERS[:4], "--model", model]
    assert "give one of them" in refused(*layers, "--anchors", 2, "--min-recovery", 0.5)
    assert "layer numbers such as 0+1" in refused(*layers, "--dense-layers", "first")
    assert "length is 4096 tokens" in refused(*layers, "--length", 9000, "--tokens", 9000)
