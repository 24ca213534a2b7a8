"""Directories of 8- and 4-bit weights: every spelling is read, and what contradicts itself is refused in a sentence."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.tiny_directory import text_of, write_model, write_tokenizer
from models.quantized_files import (
    FORMATS,
    FP8_FORMATS,
    INT4_FORMATS,
    Change,
    Tensors,
    stay_everywhere,
    write_quantized,
)
from models.test_native_step import filled, generated
from models.tiny import prompt, tiny
from refusals import refused
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from turns import in_turns

from kvsift import LLM, native
from kvsift.kernels.int4_weight import Int4Weight
from kvsift.kernels.scaled_weight import FP8
from kvsift.models import quantized
from kvsift.models.forward_pass import ForwardPass
from kvsift.models.fused_step import FusedStep
from kvsift.models.hf.model_directory import ModelDirectory
from kvsift.models.packed_linear import PackedLinear
from kvsift.models.projection import Projection
from kvsift.models.scaled_linear import Int4Linear, ScaledLinear

CPU = torch.device("cpu")
SIZES = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6, "num_key_value_heads": 2,
         "head_dim": 32}  # fmt: skip  # keys have 64 outputs, half a block of 8-bit floats
Q = "model.layers.0.self_attn.q_proj"
INTS = [name for name in FORMATS if name not in FP8_FORMATS]
needs_core = pytest.mark.skipif(not native.available(), reason="the compiled core is missing")


def write(folder: Path, name: str, change: Change | None = None, family: str = "Llama", **settings: Any) -> Tensors:
    return write_quantized(write_model(folder, family, **SIZES), name, change, **settings)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay in few bits, and are multiplied by the reference."""
    stay_everywhere(monkeypatch, stays=True)
    monkeypatch.setattr(quantized, "can_stay_packed", lambda device, dtype: False)


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


@pytest.mark.parametrize(("name", "family"), in_turns(FORMATS, ["Llama", "Qwen2"]))  # Qwen2 has biases
def test_every_spelling_is_expanded_where_it_cannot_stay(
    name: str, family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = write(tmp_path, name, family=family)
    directory = ModelDirectory.check(tmp_path)
    assert directory.stored is not None
    assert not directory.is_quantised
    stay_everywhere(monkeypatch, stays=False)
    with caplog.at_level(logging.WARNING, "kvsift"):
        model = directory.load(CPU, torch.float32)
    assert f"{directory.precision} weights are expanded to float32. They stay so on " in caplog.text
    assert "does not use" not in caplog.text
    torch.testing.assert_close(logits(model), logits(plain_like(tmp_path, weights, family)), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", [*FP8_FORMATS, *INT4_FORMATS])
def test_weights_that_stay_on_a_gpu_give_the_same_logits(name: str, tmp_path: Path) -> None:
    weights = write_quantized(write_model(tmp_path, "Qwen2", tie_word_embeddings=True, **SIZES), name)
    model = ModelDirectory.check(tmp_path).load(CPU, torch.float32)
    module = model.get_submodule(Q)
    assert isinstance(module, ScaledLinear if name in FP8_FORMATS else Int4Linear)
    torch.testing.assert_close(module.weight.expanded(torch.float32), weights[f"{Q}.weight"])
    assert type(model.lm_head) is nn.Linear
    cast = copy.deepcopy(model).to(torch.float64).get_submodule(Q)
    assert cast.scales.dtype == module.scales.dtype != torch.float64
    expected = logits(plain_like(tmp_path, weights, "Qwen2"))
    torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-3)
    layer = FusedStep(model).layers[0]
    assert all(each.weight is not None for each in layer.products)
    torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-3)  # with weights that have been joined


@needs_core
@pytest.mark.parametrize("name", INTS)
def test_whole_numbers_stay_packed_on_a_cpu(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = write(tmp_path, name, family="Qwen2")
    with caplog.at_level(logging.WARNING, "kvsift"):
        model = ModelDirectory.check(tmp_path).load(CPU, torch.float32)
    assert not caplog.text
    module = model.get_submodule(Q)
    assert isinstance(module, PackedLinear)
    assert module.matrix.affine == (name in ("gptq", "gptq_v2", "awq") or name.endswith("zeros"))
    assert bool(module.matrix.table) == (name in INT4_FORMATS)
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            own, exact = module.weight, weights[f"{name}.weight"]
            assert (own - exact).abs().max() < 2**-10 * exact.abs().max()  # minima are rounded to float16
            x = torch.randn(5, module.in_features)
            expected = x @ exact.T + weights.get(f"{name}.bias", torch.zeros(1))
            assert (module(x) - expected).norm() < 0.008 * expected.norm()
    native_steps, composed = (ForwardPass(FusedStep(model)) for _ in range(2))
    assert native_steps.native is not None
    composed.native = None
    caches = [filled(model, "dense", 50) for _ in range(2)]
    found, expected = (
        torch.stack(generated(each, [cache], 4)) for each, cache in zip((native_steps, composed), caches)
    )
    assert torch.equal(found, expected)


@needs_core
def test_scales_that_float16_does_not_hold_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "int4", lambda config, tensors: tensors[f"{Q}.weight_scale"].fill_(2.0**-30))
    with caplog.at_level(logging.WARNING, "kvsift"):
        model = ModelDirectory.check(tmp_path).load(CPU, torch.float32)
    assert f"{Q} is expanded: float16 does not hold its scales" in caplog.text
    assert type(model.get_submodule(Q)) is nn.Linear
    assert isinstance(model.get_submodule(Q.replace("q_proj", "k_proj")), PackedLinear)
    assert logits(model).isfinite().all()


@needs_core
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not say what a process has mapped")
@pytest.mark.parametrize("quantize", [None, "int4"])
def test_the_files_are_not_kept_in_memory(quantize: str | None, tmp_path: Path) -> None:
    write_model(tmp_path, **SIZES)
    if quantize is None:
        write_quantized(tmp_path, "awq")
    directory = ModelDirectory.check(tmp_path).quantized(quantize)
    model = directory.load(CPU, torch.float32)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert torch.equal(logits(directory.load(CPU, torch.float32)), logits(model))


def test_what_the_checkpoint_says_about_generation_holds(tmp_path: Path) -> None:
    write(tmp_path, "fp8-channel")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7, "repetition_penalty": 1.3}))
    generation = ModelDirectory.check(tmp_path).load(CPU, torch.float32).generation_config
    assert (generation.eos_token_id, generation.repetition_penalty) == (7, 1.3)


@pytest.mark.parametrize("name", ["fp8-transformers", "awq"])
def test_an_llm_answers_with_the_weights_of_the_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_like(tmp_path / name, write(tmp_path / name, name)).save_pretrained(tmp_path / "plain")
    write_tokenizer(tmp_path / "plain")
    stay_everywhere(monkeypatch, stays=False)
    llms = [LLM(tmp_path / each, "dense", device="cpu") for each in (name, "plain")]
    answers = [llm.generate(text_of(300), max_new_tokens=8).token_ids for llm in llms]
    assert answers[0] == answers[1]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_steps_multiply_weights_that_stay(tmp_path: Path) -> None:
    plain_like(tmp_path / "int4", write(tmp_path / "int4", "awq")).save_pretrained(tmp_path / "plain")
    write_tokenizer(tmp_path / "plain")
    llms = [LLM(tmp_path / name, "dense", device="cpu", path="eager") for name in ("int4", "plain")]
    answers = [llm.generate(text_of(200), max_new_tokens=8).token_ids for llm in llms]
    assert answers[0] == answers[1]
    assert "(float32, int4 weights)" in repr(llms[0])


def test_zero_points_that_some_have_are_given_to_all() -> None:
    def linear(zeros: Tensor | None) -> Int4Linear:
        codes = torch.randint(0, 16, (8, 64), dtype=torch.uint8)
        return Int4Linear(Int4Weight.of(codes, torch.rand(8, 1), zeros, 64), None)

    modules, x = [linear(None), linear(torch.randint(0, 16, (8, 1), dtype=torch.uint8))], torch.randn(3, 64)
    expected = torch.cat([module(x) for module in modules], 1)
    torch.testing.assert_close(Projection.of(*modules)(x), expected)


@pytest.mark.parametrize("name", ["fp8-channel", "int4", "awq", pytest.param("int8-channel", marks=needs_core)])
def test_weights_are_counted_as_they_lie_in_memory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow_others(config: dict[str, Any], tensors: Tensors) -> None:
        plain = {name: tensor for name, tensor in tensors.items() if name.endswith(".weight") and tensor.dim() == 2}
        tensors |= {name: tensor.bfloat16() for name, tensor in plain.items() if tensor.dtype == torch.float32}

    write(tmp_path, name, narrow_others)
    directory = ModelDirectory.check(tmp_path)
    assert directory.stored is not None
    if "int8" not in name:
        stay_everywhere(monkeypatch, stays=True)
    model = directory.load(CPU, torch.bfloat16)
    held = [*model.parameters(), *model.buffers()]
    held += [module.matrix.tiles for module in model.modules() if isinstance(module, PackedLinear)]
    num_bytes = sum(each.numel() * each.element_size() for each in held)
    assert num_bytes == pytest.approx(directory.weight_bytes(CPU, torch.bfloat16), rel=0.1)
    stay_everywhere(monkeypatch, stays=False)
    narrow, wide = (directory.weight_bytes(CPU, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert wide == 2 * narrow > 4 * directory.stored.num_values


def weights_of(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    return found


def lacks(part: str) -> Change:
    return lambda config, tensors: tensors.__delitem__(f"{Q}.{part}")


def says(**settings: Any) -> Change:
    return lambda config, tensors: weights_of(config).update(settings)


def holds(part: str, tensor: Tensor) -> Change:
    return lambda config, tensors: tensors.update({f"{Q}.{part}": tensor})


def lacks_groups(config: dict[str, Any], tensors: Tensors) -> None:
    del config["quantization_config"]["config_groups"]


def ignores_what_is_rounded(config: dict[str, Any], tensors: Tensors) -> None:
    config["quantization_config"]["ignore"].append(r"re:.*q_proj$")


def is_plain(config: dict[str, Any], tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith(("_scale", "_packed"))]:
        del tensors[name]
    for name, tensor in tensors.items():
        tensors[name] = tensor.float()


def is_half_plain(config: dict[str, Any], tensors: Tensors) -> None:
    tensors[f"{Q}.weight"] = tensors.pop(f"{Q}.weight", tensors.pop(f"{Q}.weight_packed", torch.ones(1))).float()


def has_groups_of_text(config: dict[str, Any], tensors: Tensors) -> None:
    config["quantization_config"]["config_groups"]["group_0"] = "Linear"


def has_a_bad_pattern(config: dict[str, Any], tensors: Tensors) -> None:
    config["quantization_config"]["ignore"] = ["re:("]


def has_its_inputs_in_another_order(config: dict[str, Any], tensors: Tensors) -> None:
    tensors[f"{Q}.g_idx"] = tensors[f"{Q}.g_idx"].flip(0).contiguous()


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("fp8-channel", lacks("weight_scale"), f"{Q}.weight_scale is missing"),
        ("int4", lacks("weight_scale"), f"{Q}.weight_scale is missing"),
        ("gptq", lacks("qzeros"), f"{Q}.qzeros is missing"),
        ("int4", says(symmetric=False), "weight_zero_point is missing"),
        ("int8-packed", says(actorder="group"), "weight_g_idx is missing"),
        ("fp8-channel", lacks_groups, "has no config_groups"),
        ("int4", lacks_groups, "has no config_groups"),
        ("fp8-channel", holds("weight_scale", torch.ones(2, 2)), "is [2, 2], and config.json calls for [192, 1]"),
        ("int4", holds("weight_scale", torch.ones(192, 1)), "is [192, 1], and config.json calls for [192, 3]"),
        ("awq", holds("qzeros", torch.ones(3, 8)), "is F32 [3, 8], and config.json calls for I32 [3, 24]"),
        ("int4", holds("weight_packed", torch.ones(192, 24)), "is F32 [192, 24], and should be a matrix of I32"),
        ("int8-channel", holds("weight", torch.ones(192, 2, 96).char()), "is I8 [192, 2, 96], and should be a matrix"),
        ("int4", says(group_size=128), "320 inputs, which are not whole groups of 128"),
        ("fp8-channel", ignores_what_is_rounded, f"says that {Q} has no floats of 8 bits"),
        ("int4", ignores_what_is_rounded, f"says that {Q} has no ints of 4 bits"),
        ("fp8-channel", is_plain, "says that weights are floats of 8 bits, and the files have no weight of F8_E4M3"),
        ("int4", is_plain, "says that weights are ints of 4 bits, and the files have no weight_packed of I32"),
        ("fp8-channel", is_half_plain, f"has {Q}.weight_scale, and no weight of F8_E4M3"),
        ("int4", is_half_plain, f"has {Q}.weight_scale, and no weight_packed of I32"),
        ("fp8-channel", says(type="int"), "has a group whose weights are not floats of 8 bits"),
        ("int4", says(type="float"), "has a group whose weights are not whole numbers"),
        ("fp8-channel", says(symmetric=False), "zero points"),
        ("fp8-channel", says(strategy="spiral"), "strategy='spiral'"),
        ("int8-channel", says(strategy="spiral"), "strategy='spiral'"),
        ("fp8-channel", has_groups_of_text, "cannot be used"),
        ("fp8-channel", has_a_bad_pattern, "cannot be used: missing "),
    ],
)  # fmt: skip
def test_a_directory_that_contradicts_itself_is_refused_before_it_is_loaded(
    name: str, change: Change, expected: str, tmp_path: Path
) -> None:
    write(tmp_path, name, change)
    with refused(f"damaged_file: {expected}"):
        ModelDirectory.check(tmp_path)


@pytest.mark.parametrize("name", ["fp8-channel", "int8-channel"])
def test_scales_of_another_dtype_are_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path, name, holds("weight_scale", torch.ones(192, 1).char()))
    with refused(f"wrong_file: {Q}.weight_scale"):
        ModelDirectory.check(tmp_path)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("fp8-transformers", {"weight_block_size": [128]}, "cannot be used"),
        ("fp8-transformers", {"weight_block_size": [0, 128]}, "at least one output"),
        ("fp8-transformers", {"weight_block_size": "all"}, "cannot be used"),
        ("fp8-transformers", {"fmt": "e5m2"}, "kvsift reads e4m3"),
        ("fp8-transformers", {"weight_block_size": None}, "calls for [1, 1]"),
        ("gptq", {"bits": None}, "cannot be used"),
        ("gptq", {"bits": 8}, "160 inputs, which are not whole groups of 64"),  # half of 320
        ("awq", {"group_size": "large"}, "cannot be used"),
    ],
)  # fmt: skip
def test_a_bad_configuration_is_refused(name: str, given: dict[str, Any], expected: str, tmp_path: Path) -> None:
    write(tmp_path, name, lambda config, _: config["quantization_config"].update(given))
    with refused(f"damaged_file: {expected}"):
        ModelDirectory.check(tmp_path)


@pytest.mark.parametrize(
    ("name", "part"),
    [("fp8-channel", "weight"), ("fp8-channel", "weight_scale"), ("gptq", "scales"), ("int8-channel", "weight_scale")],
)
def test_numbers_that_are_not_finite_are_refused(name: str, part: str, tmp_path: Path) -> None:
    def spoil(config: dict[str, Any], tensors: Tensors) -> None:
        tensor = tensors[f"{Q}.{part}"].float()
        tensor[0, 0] = torch.nan
        tensors[f"{Q}.{part}"] = tensor.to(tensors[f"{Q}.{part}"].dtype)

    write(tmp_path, name, spoil)
    directory = ModelDirectory.check(tmp_path)
    with refused("damaged_file: not finite"):
        directory.load(CPU, torch.float32)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_an_embedding_of_eight_bits_is_refused(tmp_path: Path) -> None:
    def spoil(config: dict[str, Any], tensors: Tensors) -> None:
        name = "model.embed_tokens.weight"
        tensors[name], tensors[f"{name}_scale"] = tensors[name].to(FP8), torch.ones(len(tensors[name]), 1)

    write(tmp_path, "fp8-channel", spoil)
    directory = ModelDirectory.check(tmp_path)
    with refused("unsupported_model: embed_tokens has quantised weights, and is a Embedding"):
        directory.load(CPU, torch.float32)


def test_missing_weights_are_still_named(tmp_path: Path) -> None:
    write(tmp_path, "fp8-channel", lambda config, tensors: tensors.__delitem__("model.norm.weight"))
    with refused("damaged_file: lack what config.json calls for: model.norm.weight"):
        ModelDirectory.check(tmp_path).load(CPU, torch.float32)


def test_scales_of_activations_and_caches_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def add(config: dict[str, Any], tensors: Tensors) -> None:
        tensors[f"{Q}.input_scale"] = torch.ones(1)
        tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
        config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}

    write(tmp_path, "fp8-tensor", add)
    with caplog.at_level(logging.WARNING, "kvsift"):
        ModelDirectory.check(tmp_path).load(CPU, torch.float32)
    assert "keys and values in 8 bits (kv_cache_scheme); they keep --dtype" in caplog.text
    assert "does not use" not in caplog.text


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("fp8-channel", {"quant_method": "fp8", "weight_block_size": [64, 64]}),
        ("fp8-channel", {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}),
        ("gptq", {"bits": 3}), ("gptq", {"checkpoint_format": "marlin"}), ("gptq", {"group_size": 16}),
        ("gptq", {"dynamic": {"-:.*down.*": {}}}), ("awq", {"version": "gemv"}), ("int4", {"format": "int-quantized"}),
    ],
)  # fmt: skip
def test_formats_of_others_are_left_to_transformers(name: str, given: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, name, lambda config, _: config["quantization_config"].update(given))
    directory = ModelDirectory.check(tmp_path)
    assert directory.stored is None
    assert directory.is_quantised


def test_groups_of_inputs_from_everywhere_are_expanded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    drawn = torch.Generator().manual_seed(0)

    def permute(config: dict[str, Any], tensors: Tensors) -> None:
        """Store columns of q in another order, with their groups, as a quantiser that goes by activations does."""
        config["quantization_config"]["desc_act"] = True
        order = torch.randperm(192, generator=drawn)
        words = tensors[f"{Q}.qweight"]
        codes = torch.stack([words >> shift & 15 for shift in range(0, 32, 4)], 1).flatten(0, 1)[order]
        packed = sum(codes.unflatten(0, (-1, 8)).long()[:, place] << 4 * place for place in range(8))
        assert isinstance(packed, Tensor)
        tensors[f"{Q}.qweight"] = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()
        tensors[f"{Q}.g_idx"] = tensors[f"{Q}.g_idx"][order]

    weights = write(tmp_path, "gptq", permute)
    weights[f"{Q}.weight"] = weights[f"{Q}.weight"][:, torch.randperm(192, generator=drawn.manual_seed(0))]
    with caplog.at_level(logging.WARNING, "kvsift"):
        model = ModelDirectory.check(tmp_path).load(CPU, torch.float32)
    assert (
        "Their groups have inputs from everywhere (desc_act, actorder): take a checkpoint made without" in caplog.text
    )
    torch.testing.assert_close(logits(model), logits(plain_like(tmp_path, weights)), rtol=1e-4, atol=1e-4)


def test_groups_that_the_configuration_does_not_tell_of_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "gptq", has_its_inputs_in_another_order)
    with refused(f"damaged_file: {Q}.g_idx"):
        ModelDirectory.check(tmp_path).load(CPU, torch.float32)


@pytest.mark.parametrize("name", ["fp8-channel", "int4"])
def test_weights_that_are_not_in_safetensors_are_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path, name)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with refused("wrong_file: read from *.safetensors alone"):
        ModelDirectory.check(tmp_path)


def test_weights_may_lie_in_several_files(tmp_path: Path) -> None:
    weights = write(tmp_path, "fp8-channel")
    tensors, places = load_file(tmp_path / "model.safetensors"), {}
    (tmp_path / "model.safetensors").unlink()
    for number in (0, 1):  # every weight and its scales in different files
        part = {name: tensor for name, tensor in tensors.items() if name.endswith("_scale") == bool(number)}
        places |= dict.fromkeys(part, f"model-{number}.safetensors")
        save_file(part, tmp_path / f"model-{number}.safetensors", metadata={"format": "pt"})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    model = ModelDirectory.check(tmp_path).load(CPU, torch.float32)
    torch.testing.assert_close(logits(model), logits(plain_like(tmp_path, weights)), rtol=1e-4, atol=1e-4)
