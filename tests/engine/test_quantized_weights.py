"""Answers with weights of 8 and 4 bits: expanded, or multiplied as they are."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.tiny_directory import text_of, write_model, write_tokenizer
from models.quantized_files import (
    FP8_FORMATS,
    INT4_FORMATS,
    Change,
    stay_everywhere,
    write_float4,
    write_quantized,
)
from refusals import refused
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import kvsift
from kvsift import LLM, InputError, native
from kvsift.kernels.scaled_weight import ScaledWeight, keeps_fp8, rounds_rows
from kvsift.models import quantized
from kvsift.models.hf.forward_step import kind_of_step
from kvsift.models.hf.model_directory import ModelDirectory
from kvsift.models.packed_linear import PackedLinear
from kvsift.models.projection import Projection
from kvsift.models.quantized import round_linears
from kvsift.models.scaled_linear import Int4Linear, ScaledExperts, ScaledLinear

CPU = torch.device("cpu")
QUEST = "quest:budget=128:window=16:dense_layers=0"
# random weights make pages almost equal: last bits would choose
COVERING = "quest:budget=4096:window=16:dense_layers=0"
SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_attention_heads": 8}
ROUNDING = 0.5  # of the logits: this model makes 0.2 of bfloat16's, and logits of another prompt are 1.4 away
FEW = 32  # tokens of a prompt that are multiplied in 16 bits
PREFIX = "model.layers.2."
EXPERT_SIZES = {"hidden_size": 192, "moe_intermediate_size": 160, "intermediate_size": 160}
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
HYBRID_EXPERTS = {**DELTA, "num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 160}
EXPERTS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {},
    "Mixtral": {},
    "MiniMaxM2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Glm4Moe": {"n_routed_experts": 4, "num_local_experts": 4, "n_shared_experts": 1},
    "Qwen3Next": HYBRID_EXPERTS,
    "Qwen3_5Moe": HYBRID_EXPERTS,
}
LAYERS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}  # of gpt-oss
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> None:
    """Not here: every test names its device."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("plain"), **SIZES)


def rounded(directory: Path, quantize: str, folder: Path) -> Path:
    """The same model with its weights rounded in the files, and expanded."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        stay_everywhere(patch, stays=False)
        round_linears(model, CPU, torch.float32, quantize)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize("quantize", ["fp8", "int4", "int8"])
def test_an_answer_is_that_of_the_rounded_weights(
    quantize: str, directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stay_everywhere(monkeypatch, stays=False)
    with caplog.at_level(logging.WARNING, "kvsift"):
        found = LLM(directory, QUEST, device="cpu", quantize=quantize).generate(text_of(600), max_new_tokens=12)
    assert f"{quantize} weights are expanded to float32. They stay so on " in caplog.text
    expected = LLM(rounded(directory, quantize, tmp_path), QUEST, device="cpu")
    assert found.token_ids == expected.generate(text_of(600), max_new_tokens=12).token_ids


@pytest.mark.parametrize("quantize", ["fp8", "int4"])
def test_steps_multiply_weights_that_stay(
    quantize: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stay_everywhere(monkeypatch, stays=True)
    monkeypatch.setattr(quantized, "can_stay_packed", lambda device, dtype: False)  # as on a GPU
    prompts = [text_of(600), text_of(200)]
    llm = LLM(directory, QUEST, device="cpu", quantize=quantize, path="eager")
    found = llm.generate(prompts, max_new_tokens=12)
    assert isinstance(llm.model.model.layers[0].mlp.up_proj, ScaledLinear if quantize == "fp8" else Int4Linear)
    expected = LLM(rounded(directory, quantize, tmp_path), QUEST, device="cpu", path="eager")
    answers = expected.generate(prompts, max_new_tokens=12)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in answers]
    assert found[0].path == "eager"


def stays_and_expanded(directory: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[LLM]:
    """A model whose experts stay in 8 bits, and the same one expanded."""
    models = []
    for stays in (True, False):
        stay_everywhere(monkeypatch, stays)
        llm = LLM(directory, QUEST, device="cpu", dtype="float32", path="eager", **options)
        kept = [module for module in llm.model.modules() if isinstance(module, ScaledExperts)]
        assert len(kept) == (2 * (3 - ("Glm4" in type(llm.model).__name__)) if stays else 0)
        models.append(llm)
    return models


@pytest.mark.parametrize("family", [*EXPERTS, "GptOss"])
def test_steps_multiply_experts_that_stay(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_model(tmp_path, family, eos_token_id=None, **EXPERT_SIZES, **EXPERTS.get(family, LAYERS))
    plain = LLM(directory, QUEST, device="cpu", dtype="float32", path="eager")
    prompts, how = [text_of(600), text_of(200)], {"max_new_tokens": 12}
    stays, expanded = ([llm.generate(prompt, **how) for prompt in prompts] + llm.generate(prompts, **how)
                       for llm in stays_and_expanded(directory, monkeypatch, quantize="fp8"))  # fmt: skip
    assert [answer.token_ids for answer in stays] == [answer.token_ids for answer in expanded]
    assert [answer.path for answer in stays] == ["eager"] * 4
    assert [answer.token_ids for answer in plain.generate(prompts, **how)] != [each.token_ids for each in stays[2:]]


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("name", FP8_FORMATS)
def test_experts_of_a_checkpoint_are_read_as_they_lie(
    name: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, family, eos_token_id=None, **EXPERT_SIZES, **EXPERTS[family])
    exact = write_quantized(tmp_path, name)
    models, ids = stays_and_expanded(tmp_path, monkeypatch), torch.tensor([list(range(3, 63))])
    with torch.inference_mode():
        stays, expanded = (llm.model(ids).logits for llm in models)
    torch.testing.assert_close(stays, expanded, rtol=1e-4, atol=1e-4)
    layer = models[1].model.model.layers[-1].mlp.experts
    prefix, names = "mlp", ("gate_proj", "up_proj", "down_proj")
    if family in ("Mixtral", "MiniMaxM2"):
        prefix, names = "block_sparse_moe", ("w1", "w3", "w2")
    for expert in range(4):
        gate, up, down = (exact[f"{PREFIX}{prefix}.experts.{expert}.{part}.weight"] for part in names)
        torch.testing.assert_close(layer.gate_up_proj[expert], torch.cat([gate, up]))
        torch.testing.assert_close(layer.down_proj[expert], down)


def write_gpt_oss(folder: Path, change: Change | None = None) -> dict[str, Tensor]:
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    return write_float4(write_model(folder, "GptOss", eos_token_id=None, **sizes, **LAYERS), change)


def test_experts_of_gpt_oss_are_read_as_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = write_gpt_oss(tmp_path)
    stays, expanded = stays_and_expanded(tmp_path, monkeypatch)
    assert kind_of_step(stays.model) == ("fused", [])
    for name, weight in exact.items():
        assert torch.equal(expanded.model.get_parameter(name), weight)
    for prompts in (text_of(600), [text_of(600), text_of(200)]):
        found, expected = (llm.generate(prompts, max_new_tokens=12) for llm in (stays, expanded))
        for one, other in zip(*(each if isinstance(each, list) else [each] for each in (found, expected)), strict=True):
            assert one.token_ids == other.token_ids
            assert one.path == "eager"
    assert stays.directory.weight_bytes(CPU, torch.float32) < expanded.directory.num_weight_bytes * 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda stored: stored.pop(f"{PREFIX}mlp.experts.down_proj_scales"), "has blocks [4, 64, 3, 16] of U8. MXFP4"),
        (lambda stored: stored.pop(f"{PREFIX}mlp.experts.down_proj_blocks"), "has scales [4, 64, 3] of U8. MXFP4"),
        (lambda stored: stored[f"{PREFIX}mlp.experts.down_proj_scales"].fill_(255), "has the exponent 128, and"),
        (lambda stored: [stored.pop(name) for name in list(stored) if name.endswith(("_blocks", "_scales"))],
         "says that experts are floats of 4 bits, and the files have no blocks"),
    ],
)  # fmt: skip
def test_damaged_experts_in_mxfp4_are_refused(change: Any, says: str, tmp_path: Path) -> None:
    write_gpt_oss(tmp_path, lambda config, stored: change(stored))
    with refused(f"damaged_file: {says}"):
        LLM(tmp_path, "dense", device="cpu").load()


@pytest.mark.parametrize("name", ["fp8-transformers", "awq"])
def test_the_decoder_of_a_model_that_also_sees_is_read_as_it_lies(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, folders = {**SIZES, **DELTA}, [tmp_path / "text", tmp_path / "sees"]

    def wrap(config: dict[str, Any], stored: dict[str, Tensor]) -> None:
        given, text = config.pop("quantization_config"), dict(config)
        given["modules_to_not_convert"] = ["model.visual.blocks.0.mlp", "model.language_model.layers.0.mlp.gate"]
        config.clear()
        vision = {"hidden_size": 32, "depth": 1, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 256}
        config |= {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"],
                   "text_config": text, "vision_config": vision, "quantization_config": given}  # fmt: skip
        wrapped = {key.replace("model.", "model.language_model.", 1): stored.pop(key) for key in list(stored)
                   if key.startswith("model.")}  # fmt: skip
        head = {key.replace(".0.", ".", 1).replace("model.language_model.layers", "mtp.layers"): tensor.clone()
                for key, tensor in wrapped.items() if ".layers.0.mlp." in key}  # fmt: skip
        stored |= wrapped | head | {"model.visual.pos_embed.weight": torch.zeros(4, 32)}

    stay_everywhere(monkeypatch, stays=True)
    monkeypatch.setattr(quantized, "can_stay_packed", lambda device, dtype: False)  # as on a GPU
    for folder, change in zip(folders, (None, wrap)):
        write_quantized(write_model(folder, "Qwen3_5", eos_token_id=None, **sizes), name, change)
    text, sees = (LLM(folder, QUEST, device="cpu", dtype="float32", path="eager") for folder in folders)
    mixer = sees.model.model.layers[0].linear_attn
    assert type(mixer.in_proj_qkv) is type(mixer.out_proj) is (Int4Linear if name == "awq" else ScaledLinear)
    one, other = (llm.generate([text_of(600), text_of(200)], max_new_tokens=12) for llm in (text, sees))
    assert [answer.path for answer in other] == ["eager"] * 2
    assert [answer.token_ids for answer in other] == [answer.token_ids for answer in one]
    fed = torch.tensor([list(range(3, 63))])
    stay_everywhere(monkeypatch, stays=False)
    expanded = LLM(folders[1], QUEST, device="cpu", dtype="float32")
    with torch.inference_mode():
        torch.testing.assert_close(sees.model(fed).logits, expanded.model(fed).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["fp8-channel", "int4"])
def test_the_decoder_of_gemma_is_read_as_it_lies(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names that its files have, and fused."""
    folders, layers = [tmp_path / "text", tmp_path / "sees"], ["sliding_attention", "full_attention"] * 2

    def wrap(config: dict[str, Any], stored: dict[str, Tensor]) -> None:
        given, text = config.pop("quantization_config"), dict(config)
        given["ignore"] = ["language_model.lm_head", "re:vision_tower.*"]
        vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        config.clear()
        config |= {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text,
                   "vision_config": vision, "quantization_config": given, "tie_word_embeddings": False}  # fmt: skip
        wrapped = {f"language_model.{key}": stored.pop(key) for key in list(stored)}
        stored |= wrapped | {"vision_tower.embeddings.position_embedding.weight": torch.zeros(4, 32)}

    stay_everywhere(monkeypatch, stays=True)
    monkeypatch.setattr(quantized, "can_stay_packed", lambda device, dtype: False)  # as on a GPU
    sizes = {**SIZES, "layer_types": layers, "num_hidden_layers": 4, "sliding_window": 32, "eos_token_id": None}
    for folder, change in zip(folders, (None, wrap)):
        write_quantized(write_model(folder, "Gemma3", **sizes), name, change)
    text, sees = (LLM(folder, QUEST, device="cpu", dtype="float32", path="eager") for folder in folders)
    assert type(sees.model.model.layers[0].mlp.up_proj) is (Int4Linear if name == "int4" else ScaledLinear)
    one, other = (llm.generate([text_of(600), text_of(200)], max_new_tokens=12) for llm in (text, sees))
    assert [answer.path for answer in other] == ["eager"] * 2
    assert [answer.token_ids for answer in other] == [answer.token_ids for answer in one]


def test_experts_that_are_not_alike_are_refused(tmp_path: Path) -> None:
    def drop(config: dict[str, Any], stored: dict[str, Tensor]) -> None:
        for part in ("weight", "weight_scale"):
            del stored[f"{PREFIX}mlp.experts.2.up_proj.{part}"]

    write_quantized(write_model(tmp_path, "Qwen3Moe", **EXPERT_SIZES), "fp8-channel", drop)
    with refused("damaged_file: the experts of model.layers.2.mlp.experts.gate_up_proj in"):
        LLM(tmp_path, "dense", device="cpu").load()


def test_integers_of_experts_are_left_to_transformers(tmp_path: Path) -> None:
    write_quantized(write_model(tmp_path, "Qwen3Moe", **EXPERT_SIZES), "int4-channel")
    assert ModelDirectory.check(tmp_path).is_quantised
    with refused("unsupported_model: quantize='int4' takes models of the types llama, mistral, ministral3, qwen2, "):
        LLM(write_model(tmp_path / "plain", "Qwen3Moe", **EXPERT_SIZES), "dense", quantize="int4")


@pytest.mark.skipif(not native.available(), reason="the compiled core is missing")
@pytest.mark.parametrize("name", ["quantize=int4", "quantize=int8", "awq", "int8-channel"])
def test_answers_with_packed_weights_are_the_same_alone_together_and_exact(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, **SIZES)
    _, _, quantize = name.partition("=")
    if not quantize:
        write_quantized(tmp_path, name)
    llm = LLM(tmp_path, QUEST, device="cpu", dense_below=0, deterministic=True, quantize=quantize or None)
    assert isinstance(llm.model.model.layers[0].mlp.up_proj, PackedLinear)
    prompts = [text_of(length) for length in (700, 130, 350)]
    alone = [llm.generate(prompt, plan="dense", max_new_tokens=16).token_ids for prompt in prompts]
    together = llm.generate(prompts, plan="dense", max_new_tokens=16)
    exact = llm.generate(prompts, max_new_tokens=16, exact=True)
    assert [answer.token_ids for answer in together] == alone
    assert [answer.token_ids for answer in exact] == alone


def test_it_says_what_its_weights_are(directory: Path) -> None:
    assert "(float32, fp8 weights)" in repr(LLM(directory, "dense", device="cpu", dtype="float32", quantize="fp8"))
    assert "fp8" not in repr(LLM(directory, "dense", device="cpu"))


def test_a_document_is_opened_with_the_weights_that_read_it(directory: Path, tmp_path: Path) -> None:
    file, question = tmp_path / "text.kvsift", "What is ground there?"
    document = LLM(directory, "dense", device="cpu", quantize="fp8").read(text_of(300))
    expected = document.ask(question, max_new_tokens=6)
    document.save(file)
    with refused("other_model: with quantize=fp8, and this LLM has quantize=None. Give quantize=fp8 (--quantize), or"):
        LLM(directory, "dense", device="cpu").open(file)
    again = LLM(directory, "dense", device="cpu", quantize="fp8").open(file)
    assert again.ask(question, max_new_tokens=6).token_ids == expected.token_ids


def test_formats_that_are_not_known_are_refused(directory: Path) -> None:
    with refused("unknown_name: unknown quantize 'fp9'; did you mean 'fp8'?"):
        LLM(directory, "dense", quantize="fp9")


def test_layers_that_are_not_whole_groups_of_inputs_are_refused(tmp_path: Path) -> None:
    with refused("unsupported_model: rounds weights in groups of 32 inputs, and"):
        LLM(write_model(tmp_path, hidden_size=64, intermediate_size=100), "dense", quantize="int4")


def test_weights_that_are_quantised_already_are_refused(tmp_path: Path) -> None:
    write_quantized(write_model(tmp_path, **SIZES), "fp8-channel")
    with pytest.raises(InputError, match=r"are quantised already, and quantize='fp8' rounds plain ones"):
        LLM(tmp_path, "dense", quantize="fp8")


def test_architectures_without_fused_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"takes models of the types llama, mistral, ministral3, .*, glm4_moe, .* of phi3"
    ):
        LLM(write_model(tmp_path, "Phi3"), "dense", quantize="fp8")


@pytest.mark.parametrize(
    ("family", "quantize"), [("Llama", "fp8"), ("Llama", "fp8_head"), ("Llama", "int4"), ("Qwen3Moe", "fp8")]
)
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_counted_as_they_stay(
    tied: bool, family: str, quantize: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {**SIZES, "tie_word_embeddings": tied, "moe_intermediate_size": 96}
    directory = ModelDirectory.check(write_model(tmp_path, family, **sizes)).quantized(quantize)
    for stays in (False, True):
        stay_everywhere(monkeypatch, stays)
        model = directory.load(CPU, torch.bfloat16)
        packed = [module.matrix.tiles for module in model.modules() if isinstance(module, PackedLinear)]
        held = sum(each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers(), *packed))
        assert held == pytest.approx(directory.weight_bytes(CPU, torch.bfloat16), rel=0.05)


def open_on_gpu(directory: Path, plan: str = QUEST, dtype: str = "bfloat16", **options: Any) -> LLM:
    return LLM(directory, plan, device="cuda", dtype=dtype, dense_below=0, **options)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("Llama", name) for name in ("quantize=fp8", "quantize=int4", *FP8_FORMATS, *INT4_FORMATS)),
        *(("Qwen3Moe", name) for name in ("quantize=fp8", *FP8_FORMATS)),
        *(("MiniMaxM2", name) for name in ("quantize=fp8", "fp8-transformers")),
    ],
)
def test_captured_steps_are_as_near_to_float32_as_the_composed_path(family: str, name: str, tmp_path: Path) -> None:
    sizes = {**SIZES, "moe_intermediate_size": 384, **EXPERTS.get(family, {})}
    file = write_model(tmp_path, family, **sizes) / "model.safetensors"
    _, _, quantize = name.partition("=")
    if quantize:  # weights of 32 bits would be rounded to other codes than those of 16
        save_file({key: weight.bfloat16() for key, weight in load_file(file).items()}, file, {"format": "pt"})
    else:
        write_quantized(tmp_path, name)
    llm = open_on_gpu(tmp_path, COVERING, path="captured", chunk_size=FEW, quantize=quantize or None)
    answer = llm.generate(text_of(700), max_new_tokens=40)
    assert answer.path == "captured"
    expanded = open_on_gpu(tmp_path, COVERING, dtype="float32", quantize=quantize or None)
    exact, composed = (logits_along(each, text_of(700), answer.token_ids) for each in (expanded, llm))
    assert (composed - exact).norm() < ROUNDING * exact.norm()

    def lost(chosen: Tensor) -> Tensor:
        return (exact.amax(1) - exact.gather(1, chosen[:, None])[:, 0]).mean()

    chosen = torch.tensor(answer.token_ids, device="cuda")
    assert lost(chosen) <= 2 * lost(composed.argmax(1)) + 0.1 * exact.std()


def logits_along(llm: LLM, text: str, new_ids: list[int]) -> Tensor:
    """Logits of the composed path that each new token was chosen from, float32 [tokens, vocabulary].

    The prompt is prefilled in few tokens at a time, since rows of longer chunks are rounded to 8 bits.
    """
    cache, logits = kvsift.make_cache(llm.model, COVERING), []
    *pieces, given = torch.tensor([llm.tokenizer(text)["input_ids"]], device="cuda").split(FEW, 1)
    with torch.inference_mode():
        for piece in pieces:
            llm.model(piece, past_key_values=cache, logits_to_keep=1)
        for token in new_ids:
            logits.append(llm.model(given, past_key_values=cache, logits_to_keep=1).logits[0, -1].float())
            given = torch.tensor([[token]], device="cuda")
    return torch.stack(logits)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", [*FP8_FORMATS, *INT4_FORMATS])
@pytest.mark.parametrize("rows", [1, 5, 32, 33, 400])
def test_products_on_a_gpu_are_those_of_the_files(rows: int, name: str, tmp_path: Path) -> None:
    weights = write_quantized(write_model(tmp_path, "Qwen2", **SIZES), name)  # which has biases
    layer = open_on_gpu(tmp_path).model.model.layers[0]
    names = [f"self_attn.{part}_proj" for part in "qkv"]
    stored = [[weights[f"model.layers.0.{each}.{part}"] for each in names] for part in ("weight", "bias")]
    x = torch.randn(rows, SIZES["hidden_size"]).bfloat16()
    expected = torch.nn.functional.linear(x.float(), *map(torch.cat, stored))
    joined = Projection.of(*(layer.get_submodule(each) for each in names))
    assert joined.weight is not None
    error = (joined(x.to("cuda")).float().cpu() - expected).norm() / expected.norm()
    is_rounded = rows > 32 and isinstance(joined.weight, ScaledWeight) and rounds_rows(x.to("cuda"), joined.weight)
    assert error < (0.06 if is_rounded else 0.005)
    assert (error > 0.01) == is_rounded


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", ["quantize=fp8", "quantize=int4", "fp8-transformers", "int4", "awq"])
def test_exact_answers_are_those_of_dense_attention(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, "Qwen3", **SIZES)
    _, _, quantize = name.partition("=")
    if not quantize:
        write_quantized(tmp_path, name)
    llm = open_on_gpu(tmp_path, deterministic=True, quantize=quantize or None)
    prompts = [text_of(length) for length in (700, 130, 350, 90, 510)]
    alone = [llm.generate(prompt, plan="dense", max_new_tokens=24).token_ids for prompt in prompts]
    together = llm.generate(prompts, plan="dense", max_new_tokens=24)
    exact = llm.generate(prompts, plan=QUEST, max_new_tokens=24, exact=True)
    assert [answer.token_ids for answer in together] == alone
    assert [answer.token_ids for answer in exact] == alone


@pytest.mark.gpu
@on_gpu
def test_weights_take_a_half_or_a_third_of_the_memory(tmp_path: Path) -> None:
    directory = write_model(tmp_path, hidden_size=1024, intermediate_size=4096, head_dim=64, num_attention_heads=16)
    sizes = []
    for quantize in (None, "fp8", "fp8_head", "int4"):
        before = torch.cuda.memory_allocated()
        llm = open_on_gpu(directory, quantize=quantize)
        llm.load()
        sizes.append(torch.cuda.memory_allocated() - before)
        predicted = llm.directory.weight_bytes(torch.device("cuda"), torch.bfloat16)
        assert sizes[-1] == pytest.approx(predicted, rel=0.1)
        llm.close()
        del llm
        gc.collect()
    assert keeps_fp8(torch.device("cuda"), torch.bfloat16)
    assert sizes[2] < sizes[1] < 0.6 * sizes[0]
    assert sizes[3] < 0.4 * sizes[0]
