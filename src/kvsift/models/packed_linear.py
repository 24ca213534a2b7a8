"""Modules whose weights stay packed on a CPU, in the places of ``nn.Linear`` and ``nn.Embedding``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvsift.errors import InvalidTensor, UnsupportedDevice
from kvsift.native.loader import AVAILABLE
from kvsift.native.packed import PackedMatrix, packed_product
from kvsift.native.shapes import ROW_DTYPES
from kvsift.types import Origin


class _OnHost(nn.Module):
    """A module of packed weights, which can be copied and pickled; it stays on the CPU."""

    _like: Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        # follows ``to``
        self.register_buffer("_like", torch.empty(0, dtype=dtype), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype, which looked up and expanded weights have."""
        return self._like.dtype

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if self._like.device.type != "cpu":
            raise UnsupportedDevice("packed weights stay on the CPU. Load the model on the device where it is to run.")
        return self


class _Packed(_OnHost):
    """A module of one packed matrix, which ``state_dict`` has as its expanded weight."""

    def __init__(self, matrix: PackedMatrix, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.matrix = matrix

    def dequantized(self) -> Tensor:
        """Return the weights expanded, [out, in]."""
        return self.matrix.rows(torch.arange(self.matrix.num_out), self.dtype)

    @property
    def weight(self) -> Tensor:
        """The weights, expanded at each access."""
        return self.dequantized()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.dequantized()
        super()._save_to_state_dict(destination, prefix, keep_vars)


class PackedLinear(_Packed):
    """A linear layer for inference; inputs are rounded to 8 bits (``native.packed``).

    Args:
        matrix: [out, in].
        bias: [out], or None.
        dtype: bfloat16 or float32, of inputs and outputs.
    """

    def __init__(self, matrix: PackedMatrix, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        super().__init__(matrix, dtype)
        self.bias = bias
        self.out_features, self.in_features = matrix.shape

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out].

        Raises:
            InputError: for inputs on another device or of another dtype, or if a gradient is asked for.
        """
        if not x.is_cpu or x.dtype not in ROW_DTYPES or (x.requires_grad and torch.is_grad_enabled()):
            raise InvalidTensor(
                "packed weights multiply bfloat16 or float32 on the CPU, without gradients, "
                f"and not {x.dtype} on {x.device}."
            )
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return packed_product(x.reshape(-1, self.in_features), [self.matrix], bias).view(*x.shape[:-1], -1)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class PackedEmbedding(_Packed):
    """An embedding whose rows are expanded when they are looked up.

    Args:
        matrix: [tokens, width].
        dtype: dtype of the rows that are looked up.
        scale: scale of the rows (Gemma 3), or None.
    """

    embed_scale: Tensor | None

    def __init__(self, matrix: PackedMatrix, dtype: torch.dtype, scale: Tensor | None = None) -> None:
        super().__init__(matrix, dtype)
        self.num_embeddings, self.embedding_dim = matrix.shape
        self.register_buffer("embed_scale", scale, persistent=False)

    def sample(self) -> Tensor:
        """Return the numbers of the expanded weights that ``Origin.sample`` compares."""
        count, width = self.num_embeddings * self.embedding_dim, self.embedding_dim
        places = torch.arange(0, count, Origin.step(count))
        return self.matrix.rows(places // width, self.dtype)[torch.arange(len(places)), places % width]

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [...] -> [..., width]."""
        rows = self.matrix.rows(ids, self.dtype)
        return rows if self.embed_scale is None else rows * self.embed_scale.to(rows.dtype)


@dataclass(frozen=True)
class PackedStack:
    """Weights of experts [experts, out, in], packed.

    Attributes:
        parts: matrices of each expert, whose outputs follow one another.
    """

    parts: tuple[tuple[PackedMatrix, ...], ...]

    def expanded(self, dtype: torch.dtype) -> Tensor:
        """Return the weights, rounded to a dtype."""
        return torch.stack(
            [torch.cat([part.rows(torch.arange(part.num_out), dtype) for part in own]) for own in self.parts]
        )


class PackedExperts(_OnHost):
    """The experts of a layer, in the place of transformers' modules such as ``Qwen3MoeExperts``.

    Args:
        gate_up: gate and up projection of each expert, [inter, hidden] both.
        down: [hidden, inter] of each.
        dtype: bfloat16 or float32, of inputs and outputs.
    """

    def __init__(self, gate_up: PackedStack, down: PackedStack, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.gate_up, self.down = gate_up, down

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of what experts give: x [tokens, hidden], chosen and weights [tokens, top_k] ->
        [tokens, hidden]."""
        total = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            gates = packed_product(x[tokens], self.gate_up.parts[expert], gated=True)
            outputs = packed_product(gates, self.down.parts[expert]) * weights[tokens, places, None]
            total.index_add_(0, tokens, outputs.to(x.dtype))
        return total

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}gate_up_proj"] = self.gate_up.expanded(self.dtype)
        destination[f"{prefix}down_proj"] = self.down.expanded(self.dtype)
        super()._save_to_state_dict(destination, prefix, keep_vars)


def can_stay_packed(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the compiled core multiplies packed weights there, with inputs of a dtype."""
    return AVAILABLE and device.type == "cpu" and dtype in ROW_DTYPES
