"""Loki: tokens by logits in the directions in which keys differ most (https://arxiv.org/abs/2406.02542).

Deviation from the paper: it takes the principal axes of each layer and head from a calibration text beforehand. We
have none, and take them from the sequence itself: from its first 2^n keys, as many as there are before the queries. So
they depend on nothing but the position, and cost one more look at the keys whenever the context doubles.
Keys are not stored rotated, so nothing is saved: this is the choice, not the speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvsift.methods import knobs
from kvsift.methods.base import Phase
from kvsift.methods.shares import ShareMethod
from kvsift.types import KVReader, LayerShape


@dataclass
class Axes:
    """Principal axes of the first keys of a sequence."""

    length: int = 0  # tokens they were taken from
    axes: Tensor | None = None  # float32 [num_kv_heads, head_dim, rank]

    def fork(self) -> Axes:
        return Axes(self.length, self.axes)  # never written in place

    def crop(self, length: int) -> None:
        if length < self.length:
            self.length, self.axes = 0, None


@dataclass(frozen=True)
class Loki(ShareMethod):
    """Tokens by their share of attention along a few principal axes of the keys.

    Attributes:
        rank: axes kept.
    """

    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")
    source: ClassVar[str] = "arXiv 2406.02542"

    rank: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        knobs.whole("rank", self.rank, 1)

    def new_state(self, shape: LayerShape) -> Axes:
        return Axes()

    def stand_ins(self, state: Any, shape: LayerShape, queries: Tensor, start: int, reader: KVReader) -> Tensor:
        length = 1 << (start.bit_length() - 1)
        if state.length != length:
            state.length, state.axes = length, principal_axes(reader.keys(0, length), self.rank)
        grouped = queries.float().unflatten(0, (shape.num_kv_heads, -1)).flatten(1, 2)
        kept = (grouped @ state.axes) @ state.axes.mT  # q.k along the axes alone
        return kept.reshape(queries.shape)


def principal_axes(keys: Tensor, rank: int) -> Tensor:
    """Directions of largest variance, [num_kv_heads, num_keys, head_dim] -> float32 [num_kv_heads, head_dim, rank]."""
    centred = keys.float() - keys.float().mean(1, keepdim=True)
    return torch.linalg.eigh(centred.mT @ centred).eigenvectors[..., -rank:]  # eigenvalues come ascending
