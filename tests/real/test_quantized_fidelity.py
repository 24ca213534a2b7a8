"""How far the predictions of a real model with weights of few bits are: from its own, which is what rounding costs, and
from those of the same weights in float32, which is what rounding the inputs of products costs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.quantized_files import stay_everywhere, write_quantized
from real.conftest import EXCERPTS, excerpt
from real.smollm2 import Unavailable, smollm2
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvsift import LLM, native
from kvsift.kernels.scaled_weight import round_rows_reference
from kvsift.models.hf.model_directory import ModelDirectory
from kvsift.models.packed_linear import PackedLinear

pytestmark = pytest.mark.real
needs_core = pytest.mark.skipif(not native.available(), reason="the compiled core is missing")
NUM_TOKENS = 512
CPU = torch.device("cpu")
# in nats, the mean of two texts; measured: 0.0168 and 0.0276, 0.250, 0.0011
LARGEST_KL = {"fp8": 0.02, "fp8, inputs too": 0.035, "int4": 0.3, "int8": 0.002}
LARGEST_KL_OF_INPUTS = 0.005  # measured: 0.0029 in float32, 0.0042 in bfloat16


@pytest.fixture(scope="module")
def texts(smol: Path) -> list[Tensor]:
    tokenizer = ModelDirectory.check(smol).tokenizer()
    return [torch.tensor([tokenizer(excerpt(name))["input_ids"][:NUM_TOKENS]]) for name in EXCERPTS]


@pytest.fixture(scope="module")
def exact(stock: PreTrainedModel, texts: list[Tensor]) -> Tensor:
    """What the model itself predicts."""
    return log_probabilities(stock, texts)


def log_probabilities(model: Any, texts: list[Tensor]) -> Tensor:
    with torch.inference_mode():
        return torch.cat([model(ids).logits[0].float() for ids in texts]).log_softmax(-1)


def kl(exact: Tensor, found: Tensor) -> float:
    return float((exact.exp() * (exact - found)).sum(-1).mean())


def with_rounded_inputs(model: PreTrainedModel) -> None:
    """Let linear layers but the head have inputs as in ``full_product`` on Hopper."""

    def rounded(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        values, scales = round_rows_reference(inputs[0].flatten(0, -2))
        return (values.float() * scales).view_as(inputs[0])

    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
            module.register_forward_pre_hook(rounded)


@pytest.mark.parametrize("quantize", ["fp8", "int4", "int8"])
def test_rounded_weights_keep_predictions_close(
    quantize: str, smol: Path, exact: Tensor, texts: list[Tensor], monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    stay_everywhere(monkeypatch, stays=False)
    model = ModelDirectory.check(smol).quantized(quantize).load(CPU, torch.float32)
    measured = {quantize: kl(exact, log_probabilities(model, texts))}
    if quantize == "fp8":
        with_rounded_inputs(model)
        measured["fp8, inputs too"] = kl(exact, log_probabilities(model, texts))
    record_property("measured", ", ".join(f"KL {kl:.2g} ({what})" for what, kl in measured.items()))
    assert all(kl < LARGEST_KL[what] for what, kl in measured.items()), measured


@needs_core
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gguf", torch.bfloat16), ("int4-zeros", torch.float32), ("gptq", torch.bfloat16),
        ("int8-packed-zeros", torch.float32), ("quantize=int8", torch.float32),
    ],
    ids=str,
)  # fmt: skip
def test_packed_weights_keep_predictions_close_to_expanded_ones(
    name: str, dtype: torch.dtype, smol: Path, texts: list[Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    path, (_, _, quantize) = smol, name.partition("=")
    if name == "gguf":
        try:
            path = smollm2(".gguf")
        except Unavailable as reason:
            pytest.skip(str(reason))
    elif not quantize:
        path = Path(shutil.copytree(smol, tmp_path / name))
        write_quantized(path, name)
    directory = ModelDirectory.check(path).quantized(quantize or None)
    packed = directory.load(CPU, dtype)
    assert isinstance(packed.model.layers[0].mlp.down_proj, PackedLinear)
    found = log_probabilities(packed, texts[:1])
    del packed
    monkeypatch.setattr("kvsift.models.hf.model_directory.can_stay_packed", lambda *_: False)
    stay_everywhere(monkeypatch, stays=False)
    measured = kl(log_probabilities(directory.load(CPU, torch.float32), texts[:1]), found)
    record_property("measured", f"KL {measured:.2g}")
    assert measured < LARGEST_KL_OF_INPUTS


@needs_core
def test_a_file_of_four_bits_answers(smol: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(smol, tmp_path / "awq"))
    write_quantized(path, "awq")
    llm = LLM(path, "dense", device="cpu")
    answer = llm.chat().ask("What is the capital of France?", max_new_tokens=12)
    assert "Paris" in answer.text
    assert "int4 weights" in repr(llm)
