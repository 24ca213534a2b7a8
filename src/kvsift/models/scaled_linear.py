"""Linear layers whose weights stay in 8-bit floats on a GPU, in the places of ``nn.Linear``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvsift.errors import InputError
from kvsift.kernels.linear import linear
from kvsift.kernels.scaled_weight import FP8, ScaledWeight, keeps_fp8


class ScaledLinear(nn.Module):
    """A linear layer for inference.

    Args:
        weight: [out, in].
        bias: [out], or None.

    Attributes:
        values: uint8 [out, in], the bytes of the 8-bit floats: what casts a model to another dtype leaves them alone.
        scales, outs, ins: see ``ScaledWeight``.
    """

    values: Tensor
    scales: Tensor

    def __init__(self, weight: ScaledWeight, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.register_buffer("values", weight.values.view(torch.uint8))
        self.register_buffer("scales", weight.scales)
        self.outs, self.ins = weight.outs, weight.ins
        self.bias = bias
        self.out_features, self.in_features = weight.shape

    @property
    def weight(self) -> ScaledWeight:
        """The weight, which shares the memory of the buffers."""
        return ScaledWeight(self.values.view(FP8), self.scales, self.outs, self.ins)

    def refine(self, outs: int) -> None:
        """Have fewer outputs share a scale, a divisor of ``outs``; nothing is computed otherwise."""
        if outs != self.outs:
            self.scales, self.outs = self.weight.finer(outs).scales, outs

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        scales = self.scales
        super()._apply(fn, recurse)
        self.scales = scales.to(self.values.device)  # in float32, whatever the model is cast to
        return self

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        rows = x.reshape(-1, self.in_features)
        return linear(rows, self.weight, self.bias).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def put_scaled(model: nn.Module, weights: Mapping[str, ScaledWeight]) -> None:
    """Replace the linear layers of these names, which keep their biases.

    Raises:
        InputError: naming a weight of another module.
    """
    for name, weight in weights.items():
        module = model.get_submodule(name)
        if not isinstance(module, nn.Linear):
            raise InputError(
                f"{name} has 8-bit weights, and is a {type(module).__name__}. Only linear layers can have them."
            )
        model.set_submodule(name, ScaledLinear(weight, module.bias))


def round_linears(model: Any, device: torch.device, dtype: torch.dtype, head: bool = False) -> None:
    """Round the weights of all linear layers of a transformers model to 8-bit floats with a scale per output, one by
    one on the device, and those of the head if it is asked for; an embedding that has been tied to it stays. Where they
    cannot stay so, they are expanded again."""
    kept = None if head else model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or module is kept:
            continue
        weight = ScaledWeight.of(module.weight.detach().to(device))
        if keeps_fp8(device, dtype):
            put_scaled(model, {name: weight})
        else:
            module.weight = nn.Parameter(weight.expanded(dtype), requires_grad=False)
