"""Models of a known shape with random weights, for measurements without a download."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from kvsift.errors import unknown
from kvsift.models.quantized import round_linears

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "tiny": {
        "vocab_size": 128,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
}
MAX_POSITIONS = 1 << 21  # rotary angles are defined for all of them


def random_model(
    shape: str, device: torch.device, dtype: torch.dtype, layers: int | None = None, quantize: str | None = None
) -> PreTrainedModel:
    """Return a Llama whose weights are drawn on the device; ``layers`` replaces the shape's number, and weights are
    rounded as ``LLM(quantize=...)`` rounds them.

    Raises:
        InputError: for an unknown shape.
    """
    if shape not in SHAPES:
        raise unknown("shape", shape, SHAPES)
    model = llama_of(SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers}), device, dtype)
    if quantize is not None:
        round_linears(model, device, dtype, quantize)
    return model


def llama_of(sizes: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Return a Llama of these numbers of its configuration, with random weights."""
    config = LlamaConfig(**sizes, max_position_embeddings=MAX_POSITIONS, rms_norm_eps=1e-5, tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).requires_grad_(False).eval()
