"""A model with enough heads for keys and values to lie apart from it, and where tests of that run."""

from pathlib import Path

import pytest
import torch

from kvsift import LLM

GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
)
DEVICES = ["cpu", GPU]
QUEST = "quest:budget=256:window=32:dense_layers=0"
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 8}


def llm(directory: Path, device: str, placement: str, **options: object) -> LLM:
    options = {"path": "composed" if placement == "device" else "auto", "dtype": "float32", **options}
    return LLM(directory, QUEST, device=device, placement=placement, **options)  # type: ignore[arg-type]
