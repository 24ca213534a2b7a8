"""A weight that transformers reads by ``weight[...]``, as one of safetensors, and that is expanded only then."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvsift.models.quantized import Held


class LateWeight:
    """A weight that is to be expanded, or replaced by one of few bits.

    Args:
        shape: shape of the weight.
        dtype: dtype of the expanded weight.
        expand: returns it expanded, on the CPU.
        held: what is to take its place; transformers reads NaN without memory then.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, expand: Callable[[], Tensor], held: Held | None = None
    ) -> None:
        self.shape, self.held, self._dtype, self._expand = tuple(shape), held, dtype, expand

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, _: object) -> Tensor:
        if self.held is not None:
            return torch.full((1,), torch.nan, dtype=self._dtype).expand(self.shape)
        return self._expand()
