"""kvsift calibrate --layers: the tables, the file, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli.watched import Refused, Run

LAYERS: list[Any] = ["calibrate", "--layers", "--out", "anchors.json", "--selected", 32, "--dense-layers", "none"]


def test_it_prints_what_numbers_of_anchors_recover_and_writes_a_file(
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


def test_without_a_text_it_asks_for_what_it_has_hidden(run: Run, model: Path, tmp_path: Path) -> None:
    options = [*LAYERS, "--model", model, "--tokens", 4000, "--length", 2000, "--json"]
    first, second = run(*options).document, run(*options).document
    assert first == second
    assert list(first["recipe"]["texts"]) == ["needle 0", "key_value 1"]
    assert first["recipe"]["queries"] > 20
    assert json.loads((tmp_path / "anchors.json").read_text())["recipe"] == first["recipe"]


@pytest.mark.parametrize("option", ["--anchors 2", "--min-recovery 0.5", "--selected 9", "--dense-layers 0"])
def test_options_of_layers_alone_are_refused_without_it(option: str, refused: Refused, model: Path) -> None:
    out = refused("calibrate", "--model", model, "--out", "axes.safetensors", *option.split())
    assert out == f"{option.split()[0]} is an option of --layers; add that, or leave it out."


def test_what_contradicts_itself_is_refused(refused: Refused, model: Path) -> None:
    layers = [*LAYERS[:4], "--model", model]
    assert "give one of them" in refused(*layers, "--anchors", 2, "--min-recovery", 0.5)
    assert "layer numbers such as 0+1" in refused(*layers, "--dense-layers", "first")
    assert "made for 4,096 positions" in refused(*layers, "--length", 9000, "--tokens", 9000)
