"""What a layer of experts does besides its products: which experts a token gets, and the sum of what they give."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvsift.native.loader import AVAILABLE, core
from kvsift.native.shapes import ROW_DTYPES


class Routing(NamedTuple):
    """How logits of experts become weights of the best ones.

    Attributes:
        top_k: experts of a token.
        sigmoid: the weights are sigmoids of the logits; else their softmax.
        normalised: those of the chosen experts sum to 1.
        factor: by which they are multiplied at the end.
    """

    top_k: int
    sigmoid: bool = False
    normalised: bool = True
    factor: float = 1.0


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts of tokens, best first, and their weights.

    Args:
        logits: [tokens, experts].
        routing: how weights come from them.
        bias: float32 [experts], added to weights for the choice alone, or None.

    Returns:
        int64 and float32, [tokens, top_k] both.
    """
    if not (AVAILABLE and logits.is_cpu and logits.dtype in ROW_DTYPES):
        return route_reference(logits, routing, bias)
    logits, bias = logits.contiguous(), None if bias is None else bias.float().contiguous()
    sizes = len(logits), routing.top_k
    chosen, weights = torch.empty(sizes, dtype=torch.int64), torch.empty(sizes)
    core.route(
        logits.dtype == torch.bfloat16, logits.data_ptr(), *logits.shape, *routing,
        0 if bias is None else bias.data_ptr(), chosen.data_ptr(), weights.data_ptr(),
    )  # fmt: skip
    return chosen, weights


def route_reference(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    wide = logits.float()
    weights = wide.sigmoid() if routing.sigmoid else wide.softmax(-1)
    ranked = weights if bias is None else weights + bias
    chosen = ranked.argsort(dim=-1, descending=True, stable=True)[:, : routing.top_k]
    weights = weights.gather(-1, chosen)
    if routing.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * routing.factor


def mix(outputs: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
    """``residual + sum over experts of weight * output``, the sum in float32.

    Args:
        outputs: [tokens, top_k, hidden].
        weights: float32 [tokens, top_k].
        residual: [tokens, hidden], or None.

    Returns:
        [tokens, hidden] in the dtype of the outputs.
    """
    if not (AVAILABLE and outputs.is_cpu and outputs.dtype in ROW_DTYPES):
        return mix_reference(outputs, weights, residual)
    outputs, weights = outputs.contiguous(), weights.contiguous()
    residual = None if residual is None else residual.contiguous()
    mixed = outputs.new_empty(len(outputs), outputs.shape[2])
    core.mix(
        outputs.dtype == torch.bfloat16, outputs.data_ptr(), weights.data_ptr(), *outputs.shape,
        0 if residual is None else residual.data_ptr(), mixed.data_ptr(),
    )  # fmt: skip
    return mixed


def mix_reference(outputs: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
    mixed = (outputs.float() * weights.unsqueeze(2)).sum(1).to(outputs.dtype)
    return mixed if residual is None else residual + mixed
