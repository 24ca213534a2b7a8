"""Tiny models with every type of RoPE that transformers has, stretched beyond an original maximum of 128 tokens."""

from copy import deepcopy
from typing import Any

import torch
from models.tiny import logits, prompt
from torch import Tensor
from transformers import PreTrainedModel

ORIGINAL = 128
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHORT_AND_LONG = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
KNOBS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "proportional": {"partial_rotary_factor": 0.5},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, **LLAMA3},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, **SHORT_AND_LONG},
}


def rope(kind: str) -> dict[str, Any]:
    """What a configuration says of this type. For dynamic NTK its positions are the original ones."""
    positions = ORIGINAL if kind == "dynamic" else 4 * ORIGINAL
    parameters = {"rope_type": kind, "rope_theta": 1e4, **KNOBS[kind]}
    return {"rope_parameters": parameters, "max_position_embeddings": positions}


PHI3 = {**rope("longrope"), "hidden_size": 64, "original_max_position_embeddings": ORIGINAL}


def in_one_pass(model: PreTrainedModel, ids: Tensor, length: int) -> Tensor:
    """Logits of transformers' own forward pass over all tokens of a sequence that ends with ``length``: tokens that
    come later change its rotation, and nothing else of those before."""
    stock = deepcopy(model)  # dynamic NTK remembers longer sequences
    return logits(stock, torch.cat([ids, prompt(length, seed=9)], 1)[:, :length])[:, : ids.shape[1]]


def in_one_rotation(model: PreTrainedModel, ids: Tensor, num_new: int, length: int = 0) -> Tensor:
    """Greedy tokens [1, num_new] of a model that rotates each sequence as that of ``length``, or as the whole one."""
    length, start = length or ids.shape[1] + num_new - 1, ids.shape[1]
    for _ in range(num_new):
        ids = torch.cat([ids, in_one_pass(model, ids, length)[:, -1:].argmax(-1)], 1)
    return ids[:, start:]
