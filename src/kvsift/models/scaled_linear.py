"""Linear layers whose weights stay in 8-bit floats or in 4 bits on a GPU, in the places of ``nn.Linear``, and experts
in floats of 8 or 4 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvsift.kernels.float4_stack import Float4Stack
from kvsift.kernels.int4_weight import Int4Weight
from kvsift.kernels.linear import linear
from kvsift.kernels.scaled_weight import FP8, ScaledStack, ScaledWeight


class _WithScales(nn.Module):
    """A module whose scales stay in their dtype."""

    scales: Tensor

    def __init__(self, scales: Tensor) -> None:
        super().__init__()
        self.register_buffer("scales", scales)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        scales = self.scales
        super()._apply(fn, recurse)
        self.scales = scales.to(self.scales.device)  # in their dtype, whatever the model is cast to
        return self


class _WeightLinear(_WithScales):
    """A linear layer for inference, whose weight lies in buffers.

    Args:
        weight: [out, in].
        bias: [out], or None.
    """

    weight: Any

    def __init__(self, weight: ScaledWeight | Int4Weight, bias: nn.Parameter | None) -> None:
        super().__init__(weight.scales)
        self.ins, self.bias = weight.ins, bias
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        rows = x.reshape(-1, self.in_features)
        return linear(rows, self.weight, self.bias).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class ScaledLinear(_WeightLinear):
    """A linear layer of 8-bit floats.

    Attributes:
        values: uint8 [out, in], the bytes of the 8-bit floats: what casts a model to another dtype leaves them alone.
        scales, outs, ins: see ``ScaledWeight``.
    """

    values: Tensor

    def __init__(self, weight: ScaledWeight, bias: nn.Parameter | None) -> None:
        super().__init__(weight, bias)
        self.register_buffer("values", weight.values.view(torch.uint8))
        self.outs = weight.outs

    @property
    def weight(self) -> ScaledWeight:
        """The weight, which shares the memory of the buffers."""
        return ScaledWeight(self.values.view(FP8), self.scales, self.outs, self.ins)

    def refine(self, outs: int) -> None:
        """Have fewer outputs share a scale, a divisor of ``outs``; nothing is computed otherwise."""
        if outs != self.outs:
            self.scales, self.outs = self.weight.finer(outs).scales, outs


class Int4Linear(_WeightLinear):
    """A linear layer of weights of 4 bits; ``codes``, ``scales``, ``zeros`` and ``ins`` are those of ``Int4Weight``."""

    codes: Tensor
    zeros: Tensor | None

    def __init__(self, weight: Int4Weight, bias: nn.Parameter | None) -> None:
        super().__init__(weight, bias)
        self.register_buffer("codes", weight.codes)
        self.register_buffer("zeros", weight.zeros)

    @property
    def weight(self) -> Int4Weight:
        """The weight, which shares the memory of the buffers."""
        return Int4Weight(self.codes, self.scales, self.zeros, self.ins)


class ScaledExperts(_WithScales):
    """Weights of experts in floats of 8 or 4 bits, in the place of a parameter of transformers' modules of experts;
    their products are ``models.hf.experts``.

    Attributes:
        values: uint8, see ``ScaledLinear`` and ``Float4Stack``.
        scales, outs, ins: see ``ScaledStack``.
    """

    values: Tensor

    def __init__(self, weight: ScaledStack) -> None:
        super().__init__(weight.scales)
        self.register_buffer("values", weight.values.view(torch.uint8))
        self.outs, self.ins = weight.outs, weight.ins

    @property
    def weight(self) -> ScaledStack:
        """The weights, which share the memory of the buffers."""
        if self.scales.dtype == torch.uint8:
            return Float4Stack(self.values, self.scales, self.outs, self.ins)
        return ScaledStack(self.values.view(FP8), self.scales, self.outs, self.ins)
