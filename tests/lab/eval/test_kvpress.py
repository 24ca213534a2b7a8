"""Folders that kvpress's own scripts read: their names, columns, metrics and configuration."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from kvsift_lab.eval.kvpress import write_folders
from kvsift_lab.eval.results import document_of
from lab.eval.samples import recipe_of, sample
from refusals import refused

QUEST = "quest:budget=64:window=16:sinks=4:dense_layers=none"


def result_of(folder: Path, samples: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    document = document_of(recipe_of(folder, ('"key_value"', '"niah_single_1"'), ("[700]", "[4096]")))
    return {"recipe": {**document, **changes}, "rows": document["rows"], "samples": samples}


def test_a_folder_per_data_set_length_model_press_and_ratio(tmp_path: Path) -> None:
    task = {"task": "niah_single_1", "length": 4096, "scorer": "string_match_all"}
    samples = [sample(QUEST, 64, score, question=i, **task) for i, score in enumerate((1.0, 0.5))]
    samples += [sample("dense", None, 1.0, density=1.0, **task), sample(QUEST, 64, 0.0, length=700)]
    folders = write_folders([("x", result_of(tmp_path, samples, model="org/model"))], tmp_path / "out")
    names = {folder.name for folder in folders}
    assert names == {
        "ruler__4096__org--model__quest__0.90",
        "ruler__4096__org--model__no_press__0.00",
        "kvsift__700__org--model__quest__0.90",
    }
    folder = tmp_path / "out" / "ruler__4096__org--model__quest__0.90"
    assert {path.name for path in folder.iterdir()} == {"predictions.csv", "metrics.json", "config.yaml"}
    assert json.loads((folder / "metrics.json").read_text()) == {"niah_single_1": {"string_match": 75.0}}
    with (folder / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["predicted_answer"] for row in rows] == ["12", "12"]
    assert (rows[0]["task"], rows[0]["answer"], rows[0]["compression_ratio"]) == ("niah_single_1", "['12']", "0.9")


def test_the_configuration_is_yaml_that_names_the_plan(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    made = result_of(tmp_path, [sample(QUEST, 64)], setup="whole_prompt")
    (folder,) = write_folders([("x", made)], tmp_path / "out")
    assert folder.name == "kvsift__700__kvsift--embedded__quest__0.90__query_aware"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["press_name"], config["compression_ratio"], config["query_aware"]) == ("quest", 0.9, True)
    assert config["press_init_command"] == f"kvsift {QUEST}"
    assert config["fraction"] == 1.0
    assert config["max_new_tokens"] is None


def test_names_in_a_result_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    task = "x/../../../escaped"
    made = result_of(tmp_path, [sample(QUEST, 64, task=task)], model="/models/../mine\x1b[2J")
    made["rows"] = [{**row, "name": "loki:calibration=/a/../b"} for row in made["rows"]]
    (folder,) = write_folders([("x", made)], tmp_path / "deep" / "out")
    assert folder.parent == tmp_path / "deep" / "out"
    assert folder.name == "x-..-..-..-escaped__700__--models--..--mine--2J__loki-calibration--a-..-b__0.90"
    assert {path.name for path in tmp_path.iterdir()} == {"recipe.toml", "deep"}
    assert {path.name for path in folder.iterdir()} == {"predictions.csv", "metrics.json", "config.yaml"}


def test_a_place_where_nothing_can_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with refused("unwritable_file: writing failed (Not a directory)"):
        write_folders([("x", result_of(tmp_path, [sample(QUEST, 64)]))], tmp_path / "out")
