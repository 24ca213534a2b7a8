"""Fingerprints of model directories: equal for copies, and for nothing else."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file, save_file

from kvsift.checkpoint import fingerprint

CONFIG = {"model_type": "llama", "rope_theta": 10_000, "_name_or_path": "here", "transformers_version": "5.17.0"}


def _write(directory: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return {f"layers.{n}.weight": torch.randn(64, 48, generator=drawn) for n in range(4)}


@pytest.fixture
def model(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    return _write(tmp_path / "model", tensors)


def test_a_copy_and_a_new_download_are_the_same_model(
    model: Path, tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    own = fingerprint(model)
    assert own == fingerprint(shutil.copytree(model, tmp_path / "copy"))
    again = _write(tmp_path / "again", tensors, _name_or_path="some-lab/Tiny", transformers_version="5.20.1")
    (again / "README.md").write_text("How it was trained.")
    assert own == fingerprint(again)
    assert len(own) == 32


def test_a_fine_tuned_model_of_the_same_shapes_is_another(
    model: Path, tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    tuned = {**tensors, "layers.2.weight": tensors["layers.2.weight"] * 1.001}  # as a merged adapter of one layer
    assert fingerprint(model) != fingerprint(_write(tmp_path / "tuned", tuned))


def test_a_configuration_that_computes_otherwise_is_another_model(
    model: Path, tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    assert fingerprint(model) != fingerprint(_write(tmp_path / "longer", tensors, rope_theta=1_000_000))


@pytest.mark.parametrize("changed", ["first", "second"])
def test_every_shard_counts(model: Path, changed: str) -> None:
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names, shards = sorted(tensors), ("first.safetensors", "second.safetensors")
    parts = dict(zip(shards, (names[:2], names[2:]), strict=True))
    weight_map = {name: file for file, held in parts.items() for name in held}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    def save(file: str, factor: float = 1.0) -> None:
        save_file({name: tensors[name] * factor for name in parts[file]}, model / file)

    for file in shards:
        save(file)
    own = fingerprint(model)
    save(f"{changed}.safetensors", 1.001)
    assert fingerprint(model) != own
    (model / f"{changed}.safetensors").unlink()
    with refused(f"missing_file: {changed}"):
        fingerprint(model)


def test_weights_in_torch_files_count(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    torch.save(tensors, model / "pytorch_model.bin")
    own = fingerprint(model)
    tensors["layers.1.weight"] *= 1.001
    torch.save(tensors, model / "pytorch_model.bin")
    assert fingerprint(model) != own


def test_a_directory_without_weights_has_no_fingerprint(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with refused("missing_file"):
        fingerprint(model)
    (model / "config.json").write_text("[]")
    with refused("unreadable_file: config.json"):
        fingerprint(model)
