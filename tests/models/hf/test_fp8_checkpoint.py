"""Directories of 8-bit floats: every spelling is read, and what contradicts itself is refused in a sentence."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.tiny_directory import text_of, write_model, write_tokenizer
from models.fp8_files import FORMATS, Tensors, write_fp8
from models.tiny import prompt, tiny
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kvsift import LLM
from kvsift.errors import InputError
from kvsift.kernels.scaled_weight import FP8
from kvsift.models.hf import model_directory
from kvsift.models.hf.model_directory import ModelDirectory
from kvsift.models.projection import Projection
from kvsift.models.scaled_linear import ScaledLinear

CPU = torch.device("cpu")
SIZES = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6, "num_key_value_heads": 2,
         "head_dim": 32}  # fmt: skip  # keys have 64 outputs, half a block
Q = "model.layers.0.self_attn.q_proj"


def write(folder: Path, name: str, change: Callable[[dict[str, Any], Tensors], None] | None = None, **how: Any) -> Path:
    write_model(folder, **{**SIZES, **how})
    write_fp8(folder, name, change)
    return folder


@pytest.fixture
def stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay in 8 bits as on a GPU, and are multiplied by the reference."""
    monkeypatch.setattr(model_directory, "keeps_fp8", lambda device, dtype: True)
    monkeypatch.setattr("kvsift.models.hf.fp8_checkpoint.keeps_fp8", lambda device, dtype: True)
    monkeypatch.setattr("kvsift.models.scaled_linear.keeps_fp8", lambda device, dtype: True)


def plain_like(folder: Path, weights: Tensors, family: str = "Llama") -> Any:
    """The model of a directory, with these weights."""
    config = json.loads((folder / "config.json").read_text())
    names = (*SIZES, "vocab_size", "num_hidden_layers", "max_position_embeddings", "tie_word_embeddings")
    model = tiny(family, **{name: config[name] for name in names})
    model.load_state_dict({**model.state_dict(), **weights})
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(prompt(40)).logits


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])  # Qwen2 has biases
@pytest.mark.parametrize("name", FORMATS)
def test_every_spelling_is_expanded_on_a_cpu(
    name: str, family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = write_fp8(write_model(tmp_path, family, **SIZES), name)
    directory = ModelDirectory.check(tmp_path)
    assert directory.stored is not None
    assert not directory.is_quantised
    with caplog.at_level(logging.WARNING, "kvsift"):
        model = directory.load(CPU, torch.float32)
    assert "fp8 weights are expanded to float32" in caplog.text
    torch.testing.assert_close(logits(model), logits(plain_like(tmp_path, weights, family)), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("stay")
@pytest.mark.parametrize("name", FORMATS)
def test_weights_that_stay_give_the_same_logits(name: str, tmp_path: Path) -> None:
    weights = write_fp8(write_model(tmp_path, "Qwen2", tie_word_embeddings=True, **SIZES), name)
    model = ModelDirectory.check(tmp_path).load(CPU, torch.float32)
    stored = load_file(tmp_path / "model.safetensors")
    layer = model.model.layers[0]
    assert isinstance(layer.self_attn.q_proj, ScaledLinear)
    assert torch.equal(layer.self_attn.q_proj.weight.values.float(), stored[f"{Q}.weight"].float())
    assert type(model.lm_head) is nn.Linear
    found, expected = logits(model), logits(plain_like(tmp_path, weights, "Qwen2"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    joined = Projection.of(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
    assert joined.weight is not None
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_what_the_checkpoint_says_about_generation_holds(tmp_path: Path) -> None:
    write(tmp_path, "channel")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7, "repetition_penalty": 1.3}))
    generation = ModelDirectory.check(tmp_path).load(CPU, torch.float32).generation_config
    assert (generation.eos_token_id, generation.repetition_penalty) == (7, 1.3)


def test_an_llm_answers_with_the_weights_of_the_files(tmp_path: Path) -> None:
    weights = write_fp8(write_model(tmp_path / "fp8", **SIZES), "transformers")
    plain = plain_like(tmp_path / "fp8", weights)
    plain.save_pretrained(tmp_path / "plain")
    write_tokenizer(tmp_path / "plain")
    answers = [LLM(tmp_path / name, "dense").generate(text_of(300), max_new_tokens=8) for name in ("fp8", "plain")]
    assert answers[0].token_ids == answers[1].token_ids


@pytest.mark.usefixtures("stay")
def test_weights_are_counted_as_they_lie_in_memory(tmp_path: Path) -> None:
    directory = ModelDirectory.check(write(tmp_path, "channel"))
    model = directory.load(CPU, torch.bfloat16)
    held = sum(each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers()))
    assert held == pytest.approx(directory.weight_bytes(CPU, torch.bfloat16), rel=0.25)  # the files are float32


def test_weights_that_are_expanded_are_counted_as_such(tmp_path: Path) -> None:
    directory = ModelDirectory.check(write(tmp_path, "channel"))
    assert directory.stored is not None
    narrow, wide = (directory.weight_bytes(CPU, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert wide == 2 * narrow > 4 * directory.stored.num_values


def lacks_scale(config: dict[str, Any], tensors: Tensors) -> None:
    del tensors[f"{Q}.weight_scale"]


def lacks_groups(config: dict[str, Any], tensors: Tensors) -> None:
    del config["quantization_config"]["config_groups"]


def has_scales_of_blocks(config: dict[str, Any], tensors: Tensors) -> None:
    tensors[f"{Q}.weight_scale"] = torch.ones(2, 2)


def ignores_what_is_rounded(config: dict[str, Any], tensors: Tensors) -> None:
    config["quantization_config"]["ignore"].append(r"re:.*q_proj$")


def is_plain(config: dict[str, Any], tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith("_scale")]:
        del tensors[name]
    for name, tensor in tensors.items():
        tensors[name] = tensor.float()


def is_half_plain(config: dict[str, Any], tensors: Tensors) -> None:
    tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"].float()


def has_integers(config: dict[str, Any], tensors: Tensors) -> None:
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["type"] = "int"


def has_zero_points(config: dict[str, Any], tensors: Tensors) -> None:
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = False


def has_an_unknown_strategy(config: dict[str, Any], tensors: Tensors) -> None:
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] = "spiral"


def has_scales_of_bytes(config: dict[str, Any], tensors: Tensors) -> None:
    tensors[f"{Q}.weight_scale"] = tensors[f"{Q}.weight_scale"].to(torch.uint8)


def has_groups_of_text(config: dict[str, Any], tensors: Tensors) -> None:
    config["quantization_config"]["config_groups"]["group_0"] = "Linear"


def has_a_bad_pattern(config: dict[str, Any], tensors: Tensors) -> None:
    config["quantization_config"]["ignore"] = ["re:("]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lacks_scale, rf"{Q}\.weight .* has no scales: {Q}\.weight_scale is missing"),
        (lacks_groups, "has no config_groups"),
        (has_scales_of_blocks, rf"{Q}\.weight_scale .* is \[2, 2\], and config\.json calls for \[192, 1\]"),
        (ignores_what_is_rounded, rf"says that {Q} has no 8-bit weights, and the files have them"),
        (is_plain, r"says that weights are 8-bit floats, and the files have none"),
        (is_half_plain, rf"has {Q}\.weight_scale, and no 8-bit floats"),
        (has_integers, "has a group whose weights are not floats of 8 bits"),
        (has_zero_points, "zero points"),
        (has_an_unknown_strategy, "strategy='spiral'"),
        (has_scales_of_bytes, rf"{Q}\.weight_scale .* is U8; kvsift reads scales of F32, BF16, F16"),
        (has_groups_of_text, "cannot be used"),
        (has_a_bad_pattern, "cannot be used: missing "),
    ],
)
def test_a_directory_that_contradicts_itself_is_refused_before_it_is_loaded(
    change: Callable[[dict[str, Any], Tensors], None], says: str, tmp_path: Path
) -> None:
    write(tmp_path, "channel", change)
    with pytest.raises(InputError, match=says):
        ModelDirectory.check(tmp_path)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"weight_block_size": [128]}, "cannot be used"),
        ({"weight_block_size": [0, 128]}, "at least one output"),
        ({"weight_block_size": "all"}, "cannot be used"),
        ({"fmt": "e5m2"}, "kvsift reads e4m3"),
        ({"weight_block_size": None}, r"calls for \[1, 1\]"),
    ],
)
def test_a_bad_configuration_of_transformers_is_refused(given: dict[str, Any], says: str, tmp_path: Path) -> None:
    write(tmp_path, "transformers", lambda config, _: config["quantization_config"].update(given))
    with pytest.raises(InputError, match=says):
        ModelDirectory.check(tmp_path)


@pytest.mark.parametrize("name", ["weight", "weight_scale"])
def test_numbers_that_are_not_finite_are_refused(name: str, tmp_path: Path) -> None:
    def spoil(config: dict[str, Any], tensors: Tensors) -> None:
        tensor = tensors[f"{Q}.{name}"].float()
        tensor[3, 0] = torch.nan
        tensors[f"{Q}.{name}"] = tensor.to(tensors[f"{Q}.{name}"].dtype)

    directory = ModelDirectory.check(write(tmp_path, "channel", spoil))
    with pytest.raises(InputError, match="not finite"):
        directory.load(CPU, torch.float32)


@pytest.mark.usefixtures("stay")
def test_an_embedding_of_eight_bits_is_refused(tmp_path: Path) -> None:
    def spoil(config: dict[str, Any], tensors: Tensors) -> None:
        name = "model.embed_tokens.weight"
        tensors[name], tensors["model.embed_tokens.weight_scale"] = (
            tensors[name].to(FP8),
            torch.ones(len(tensors[name]), 1),
        )

    directory = ModelDirectory.check(write(tmp_path, "channel", spoil))
    with pytest.raises(InputError, match=r"embed_tokens has quantised weights, and is a Embedding"):
        directory.load(CPU, torch.float32)


def test_missing_and_misshapen_weights_are_still_named(tmp_path: Path) -> None:
    def spoil(config: dict[str, Any], tensors: Tensors) -> None:
        del tensors["model.norm.weight"]

    with pytest.raises(InputError, match=r"lack what config\.json calls for: model\.norm\.weight"):
        ModelDirectory.check(write(tmp_path, "channel", spoil)).load(CPU, torch.float32)


def test_scales_of_activations_and_caches_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def add(config: dict[str, Any], tensors: Tensors) -> None:
        tensors[f"{Q}.input_scale"] = torch.ones(1)
        tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
        config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}

    with caplog.at_level(logging.WARNING, "kvsift"):
        ModelDirectory.check(write(tmp_path, "tensor", add)).load(CPU, torch.float32)
    assert "keys and values in 8 bits (kv_cache_scheme); they keep --dtype" in caplog.text
    assert "does not use" not in caplog.text


@pytest.mark.parametrize(
    "given", [{"quant_method": "fp8", "weight_block_size": [64, 64]}, {"quant_method": "compressed-tensors"}]
)
def test_formats_of_others_are_left_to_transformers(given: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, "channel", lambda config, _: config.update(quantization_config=given))
    directory = ModelDirectory.check(tmp_path)
    assert directory.stored is None
    assert directory.is_quantised


def test_weights_that_are_not_in_safetensors_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "channel")
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"read from \*\.safetensors alone"):
        ModelDirectory.check(tmp_path)


def test_weights_may_lie_in_several_files(tmp_path: Path) -> None:
    weights = write_fp8(write_model(tmp_path, **SIZES), "channel")
    tensors, places = load_file(tmp_path / "model.safetensors"), {}
    (tmp_path / "model.safetensors").unlink()
    for number in (0, 1):  # every weight and its scales in different files
        part = {name: tensor for name, tensor in tensors.items() if name.endswith("_scale") == bool(number)}
        places |= dict.fromkeys(part, f"model-{number}.safetensors")
        save_file(part, tmp_path / f"model-{number}.safetensors", metadata={"format": "pt"})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    model = ModelDirectory.check(tmp_path).load(CPU, torch.float32)
    torch.testing.assert_close(logits(model), logits(plain_like(tmp_path, weights)), rtol=1e-4, atol=1e-4)
