"""Directories of weights of 4 bits: every spelling is read, and what contradicts itself is refused in a sentence."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.tiny_directory import text_of, write_model
from models.tiny import prompt, tiny
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kvsift import LLM
from kvsift.errors import InputError
from kvsift.kernels.int4_weight import Int4Weight
from kvsift.models.decoder_step import DecoderStep
from kvsift.models.hf.int4_checkpoint import Int4Checkpoint
from kvsift.models.hf.model_directory import ModelDirectory
from kvsift.models.projection import Projection
from kvsift.models.scaled_linear import Int4Linear

CPU = torch.device("cpu")
SIZES = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6, "num_key_value_heads": 2,
         "head_dim": 32}  # fmt: skip
GROUP = 64
Q = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, Tensor]


def compressed(symmetric: bool, strategy: str = "group") -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": strategy, "symmetric": symmetric}
    group = {"targets": ["Linear"], "weights": weights | ({"group_size": GROUP} if strategy == "group" else {})}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


FORMATS: dict[str, dict[str, Any]] = {
    "symmetric": compressed(True),
    "channel": compressed(True, "channel"),
    "asymmetric": compressed(False),
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False},
    "gptq_v2": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
}


def words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 [..., n / 8] of codes [..., n]; the i-th lowest of a word is the one at ``order[i]``; padded with 0."""
    codes = nn.functional.pad(codes.long(), (0, -codes.shape[-1] % 8)).unflatten(-1, (-1, 8))
    whole = sum(codes[..., place] << 4 * number for number, place in enumerate(order))
    assert isinstance(whole, Tensor)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).int()


def stored_as(name: str, layer: str, codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensors:
    """The tensors of codes [out, in], scales and zeros [out, groups], in a format."""
    if name == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        parts = {"qweight": words(codes.t(), order), "qzeros": words(zeros.t(), order), "scales": scales.t()}
    elif name.startswith("gptq"):
        points = words(zeros.t() - (1 if name == "gptq" else 0))
        parts = {"qweight": words(codes).t(), "qzeros": points, "scales": scales.t(),
                 "g_idx": torch.arange(codes.shape[1], dtype=torch.int32) // GROUP}  # fmt: skip
    else:
        parts = {
            "weight_packed": words(codes),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor(codes.shape),
        }
        if name == "asymmetric":
            parts["weight_zero_point"] = words(zeros.t()).t()
    return {f"{layer}.{part}": tensor.contiguous() for part, tensor in parts.items()}


def write(
    folder: Path, name: str, change: Callable[[dict[str, Any], Tensors], None] | None = None, family: str = "Llama"
) -> Tensors:
    """A model whose linear weights are random codes; returns all its weights in float32."""
    write_model(folder, family, **SIZES)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    config["quantization_config"] = json.loads(json.dumps(FORMATS[name]))
    stored, exact = dict(tensors), dict(tensors)
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        num_out, num_in = stored.pop(key).shape
        ins = num_in if name == "channel" else GROUP
        codes = torch.randint(0, 16, (num_out, num_in))
        scales = (torch.rand(num_out, num_in // ins) * 0.03 + 0.01).bfloat16().half()
        zeros = (
            torch.randint(1, 16, scales.shape) if name not in ("symmetric", "channel") else torch.full(scales.shape, 8)
        )
        stored |= stored_as(name, key.removesuffix(".weight"), codes, scales, zeros)
        exact[key] = (codes - zeros.repeat_interleave(ins, 1)) * scales.float().repeat_interleave(ins, 1)
    if change is not None:
        change(config, stored)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return exact


@pytest.fixture
def stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay in 4 bits as on a GPU, and are multiplied by the reference."""
    monkeypatch.setattr(Int4Checkpoint, "stays", lambda self, device, dtype: True)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(prompt(40)).logits


def plain_like(folder: Path, weights: Tensors, family: str = "Llama") -> Any:
    config = json.loads((folder / "config.json").read_text())
    names = (*SIZES, "vocab_size", "num_hidden_layers", "max_position_embeddings", "tie_word_embeddings")
    model = tiny(family, **{name: config[name] for name in names})
    model.load_state_dict({**model.state_dict(), **weights})
    return model


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])  # Qwen2 has biases
@pytest.mark.parametrize("name", FORMATS)
def test_every_spelling_is_expanded_on_a_cpu(
    name: str, family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = write(tmp_path, name, family=family)
    directory = ModelDirectory.check(tmp_path)
    assert isinstance(directory.stored, Int4Checkpoint)
    with caplog.at_level(logging.WARNING, "kvsift"):
        model = directory.load(CPU, torch.float32)
    assert "int4 weights are expanded to float32. They stay on NVIDIA GPUs, in bfloat16 or float16" in caplog.text
    assert "does not use" not in caplog.text
    torch.testing.assert_close(logits(model), logits(plain_like(tmp_path, weights, family)), rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("stay")
@pytest.mark.parametrize("name", FORMATS)
def test_weights_that_stay_give_the_same_logits(name: str, tmp_path: Path) -> None:
    weights = write(tmp_path, name)
    model = ModelDirectory.check(tmp_path).load(CPU, torch.float32)
    assert isinstance(model.model.layers[0].mlp.up_proj, Int4Linear)
    expected = logits(plain_like(tmp_path, weights))
    torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-3)
    narrow = copy.deepcopy(model).to(torch.float64).model.layers[0].mlp.up_proj
    assert narrow.scales.dtype == model.model.layers[0].mlp.up_proj.scales.dtype != torch.float64
    layer = DecoderStep(model).layers[0]
    assert all(isinstance(each.weight, Int4Weight) for each in (layer.qkv, layer.output, layer.gate_up, layer.down))
    torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-3)  # with weights that have been joined


@pytest.mark.usefixtures("stay")
def test_steps_multiply_weights_that_stay(tmp_path: Path) -> None:
    plain_like(tmp_path / "int4", write(tmp_path / "int4", "awq")).save_pretrained(tmp_path / "plain")
    for file in (tmp_path / "int4").glob("tokenizer*"):
        (tmp_path / "plain" / file.name).write_bytes(file.read_bytes())
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


def lacks_scales(config: dict[str, Any], tensors: Tensors) -> None:
    del tensors[f"{Q}.weight_scale"]


def has_scales_of_channels(config: dict[str, Any], tensors: Tensors) -> None:
    tensors[f"{Q}.weight_scale"] = torch.ones(192, 1)


def lacks_zero_points(config: dict[str, Any], tensors: Tensors) -> None:
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = False


def lacks_groups(config: dict[str, Any], tensors: Tensors) -> None:
    del config["quantization_config"]["config_groups"]


def has_plain_weights(config: dict[str, Any], tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith("weight_packed")]:
        tensors[name.replace("weight_packed", "weight")] = tensors.pop(name).float()


def has_another_group_size(config: dict[str, Any], tensors: Tensors) -> None:
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 128


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lacks_scales, rf"has no weight_scale: {Q}\.weight_scale is missing"),
        (has_scales_of_channels, r"is \[192, 1\], and should be \[192, 3\]"),
        (lacks_zero_points, r"down_proj\.weight_zero_point is missing"),
        (lacks_groups, "cannot be used: it has no 'config_groups'"),
        (has_plain_weights, "says that weights have 4 bits, and the files have no weight_packed"),
        (has_another_group_size, "320 inputs, which are not whole groups of 128"),
    ],
)
def test_a_directory_that_contradicts_itself_is_refused_before_it_is_loaded(
    change: Callable[[dict[str, Any], Tensors], None], says: str, tmp_path: Path
) -> None:
    write(tmp_path, "symmetric", change)
    with pytest.raises(InputError, match=says):
        ModelDirectory.check(tmp_path)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("gptq", {"bits": 8}), ("gptq", {"desc_act": True}), ("gptq", {"checkpoint_format": "marlin"}),
        ("gptq", {"group_size": 16}), ("awq", {"version": "gemv"}), ("symmetric", {"format": "int-quantized"}),
    ],
)  # fmt: skip
def test_formats_of_others_are_left_to_transformers(name: str, given: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, name, lambda config, _: config["quantization_config"].update(given))
    directory = ModelDirectory.check(tmp_path)
    assert directory.stored is None
    assert directory.is_quantised


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    def spoil(config: dict[str, Any], tensors: Tensors) -> None:
        tensors[f"{Q}.scales"][0, 0] = torch.inf

    write(tmp_path, "gptq", spoil)
    with pytest.raises(InputError, match="not finite"):
        ModelDirectory.check(tmp_path).load(CPU, torch.float32)


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", FORMATS)
def test_products_on_a_gpu_are_those_of_the_files(name: str, tmp_path: Path) -> None:
    weights = write(tmp_path, name, family="Qwen2")
    layer = LLM(tmp_path, "dense", device="cuda", dtype="bfloat16").model.model.layers[0]
    names = [f"self_attn.{part}_proj" for part in "qkv"]
    stored = [[weights[f"model.layers.0.{each}.{part}"] for each in names] for part in ("weight", "bias")]
    joined = Projection.of(*(layer.get_submodule(each) for each in names))
    assert isinstance(joined.weight, Int4Weight)
    for rows in (1, 5, 32, 33, 400):
        x = torch.randn(rows, SIZES["hidden_size"]).bfloat16()
        expected = nn.functional.linear(x.float(), *map(torch.cat, stored))
        error = (joined(x.to("cuda")).float().cpu() - expected).norm() / expected.norm()
        assert error < 0.005, rows


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", ["symmetric", "awq"])
def test_captured_answers_are_the_same_alone_together_and_exact(name: str, tmp_path: Path) -> None:
    write(tmp_path, name)
    plan = "quest:budget=128:window=16:dense_layers=0"
    llm = LLM(tmp_path, plan, device="cuda", dtype="bfloat16", deterministic=True)
    prompts = [text_of(length) for length in (700, 130, 350)]
    alone = [llm.generate(prompt, plan="dense", max_new_tokens=24) for prompt in prompts]
    assert all(answer.path.startswith("captured") for answer in alone)
    together = llm.generate(prompts, plan="dense", max_new_tokens=24)
    exact = llm.generate(prompts, max_new_tokens=24, exact=True)
    for answers in (together, exact):
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in alone]
