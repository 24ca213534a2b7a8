"""How far the predictions of a real model with 8-bit weights are from its own: what rounding the weights costs, and
what rounding the inputs of a prompt adds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from real.conftest import EXCERPTS, excerpt
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvsift.kernels.scaled_weight import round_rows_reference
from kvsift.models.hf.model_directory import ModelDirectory

pytestmark = pytest.mark.real
NUM_TOKENS = 512
CPU = torch.device("cpu")
LARGEST_KL = {"weights": 0.02, "weights and inputs": 0.035}  # in nats, the mean; measured: 0.0168 and 0.0276


def with_rounded_inputs(model: PreTrainedModel) -> None:
    """Let linear layers but the head have inputs as in ``full_product`` on Hopper."""

    def rounded(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        values, scales = round_rows_reference(inputs[0].flatten(0, -2))
        return (values.float() * scales).view_as(inputs[0])

    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
            module.register_forward_pre_hook(rounded)


def test_predictions_with_eight_bits_stay_close(
    smol: Path, stock: PreTrainedModel, record_property: Callable[[str, object], None]
) -> None:
    directory = ModelDirectory.check(smol)
    tokenizer = directory.tokenizer()
    texts = [torch.tensor([tokenizer(excerpt(name))["input_ids"][:NUM_TOKENS]]) for name in EXCERPTS]

    def log_probabilities(model: Any) -> Tensor:
        with torch.inference_mode():
            return torch.cat([model(ids).logits[0].float() for ids in texts]).log_softmax(-1)

    exact, model = log_probabilities(stock), directory.quantized("fp8").load(CPU, torch.float32)
    measured = {}
    for what in LARGEST_KL:
        if "inputs" in what:
            with_rounded_inputs(model)
        measured[what] = float((exact.exp() * (exact - log_probabilities(model))).sum(-1).mean())
    record_property("measured", ", ".join(f"KL {kl:.2g} ({what})" for what, kl in measured.items()))
    assert all(kl < LARGEST_KL[what] for what, kl in measured.items()), measured
