"""Experts of transformers' models in captured steps: no sorting and no host for a few rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from kvsift.kernels.expert_linear import expert_linear
from kvsift.kernels.float4_stack import Float4Stack
from kvsift.kernels.routed_experts import expert_products
from kvsift.kernels.triton_shim import runs_on_triton
from kvsift.models.scaled_linear import ScaledExperts

NAME, REPLACED = "kvsift", "grouped_mm"
MOST_PAIRS = 512  # of a row and an expert: with more, an expert has many rows, and is better read once for them


def take_experts(model: Any) -> None:
    """Let the experts of a model run by ``experts_forward``, if they can and no other way was asked for, or none other
    multiplies their floats of few bits."""
    can = model.config._experts_implementation == REPLACED and not getattr(model, "is_quantized", False)
    if can or any(isinstance(module, ScaledExperts) for module in model.modules()):
        ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
        model.set_experts_implementation(NAME)


def experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """As transformers' own functions for experts: hidden_states [rows, hidden], top_k_* [rows, top_k] -> [rows,
    hidden]."""
    experts: Any = module
    parallel = getattr(experts, "_is_expert_parallel", False)  # transformers 5.17 has no such attribute
    if top_k_index.numel() > MOST_PAIRS or parallel:
        expanded: Any = Expanded(module, hidden_states.dtype)
        output: Tensor = grouped_mm_experts_forward(expanded, hidden_states, top_k_index, top_k_weights)
        return output
    name, ids = "gate_up_proj" if experts.has_gate else "up_proj", top_k_index.flatten()
    x = _product(experts, name, hidden_states, ids)  # [rows * top_k, inter, or twice that]
    x = experts._apply_gate(x) if experts.has_gate else experts.act_fn(x)
    x = _product(experts, "down_proj", x, ids)  # [rows * top_k, hidden]
    if getattr(experts, "has_post_expert_norm", False):
        x = experts.post_expert_norm(x)
    x = x * top_k_weights.reshape(-1, 1)
    return x.view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)


class Expanded:
    """A module of experts whose floats of few bits are expanded when read: for many rows they are read once."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self._experts, self._dtype = experts, dtype

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._experts, name)
        if not isinstance(found, ScaledExperts):
            return found
        weight = found.weight.expanded(self._dtype)
        return weight.mT if self._experts.is_transposed else weight


def _product(experts: Any, name: str, x: Tensor, ids: Tensor) -> Tensor:
    weight = getattr(experts, name)
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    if isinstance(weight, ScaledExperts):
        stack = weight.weight
        if isinstance(stack, Float4Stack) and runs_on_triton(x):
            return expert_products(x.contiguous(), ids.view(len(x), -1), stack, bias).flatten(0, 1)
        return expert_linear(x, stack, ids, bias)
    return expert_linear(x, weight.mT if experts.is_transposed else weight, ids, bias)
