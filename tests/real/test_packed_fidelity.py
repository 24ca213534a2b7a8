"""How far the predictions of a real model with packed weights are from those of the same weights in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from real.conftest import EXCERPTS, excerpt
from real.smollm2 import Unavailable, smollm2

from kvsift import native
from kvsift.models.hf.model_directory import ModelDirectory
from kvsift.models.packed_linear import PackedLinear

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not native.available(), reason="the compiled core is missing"),
]
NUM_TOKENS = 512
LARGEST_KL = 0.005  # in nats, the mean; measured: 0.0029 in float32, 0.0042 in bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_weights_keep_predictions_close_to_expanded_ones(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    try:
        directory = ModelDirectory.check(smollm2(".gguf"))
    except Unavailable as reason:
        pytest.skip(str(reason))
    ids = torch.tensor([directory.tokenizer()(excerpt(next(iter(EXCERPTS))))["input_ids"][:NUM_TOKENS]])

    def log_probabilities(model: Any) -> torch.Tensor:
        with torch.inference_mode():
            return model(ids).logits[0].float().log_softmax(-1)

    packed = directory.load(torch.device("cpu"), dtype)
    assert isinstance(packed.model.layers[0].mlp.down_proj, PackedLinear)
    found = log_probabilities(packed)
    monkeypatch.setattr("kvsift.models.hf.model_directory.can_stay_packed", lambda *_: False)
    exact = log_probabilities(directory.load(torch.device("cpu"), torch.float32))
    kl = float((exact.exp() * (exact - found)).sum(-1).mean())
    record_property("measured", f"KL {kl:.2g}")
    assert kl < LARGEST_KL
