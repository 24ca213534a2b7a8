"""A method that attends densely and writes down what it is asked: sampled prompt queries, and all that come later."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvsift.methods.dense import Dense
from kvsift.types import LayerShape

RECENT = 256  # queries at the end of the document that are always kept


def sample_positions(length: int, capacity: int) -> Tensor:
    """Positions of at most ``capacity`` prompt queries: evenly spaced, and the last ones all; int64, ascending."""
    recent = min(RECENT, capacity // 2)
    if length <= capacity:
        return torch.arange(length)
    stride = -(-(length - recent) // (capacity - recent))
    return torch.cat([torch.arange(0, length - recent, stride), torch.arange(length - recent, length)])


class LayerRecord:
    """What one layer was asked.

    Args:
        shape: the layer.
        wanted: int64, ascending; positions of the document whose queries are kept.
        length: tokens of the document; every query from there on is kept.
    """

    def __init__(self, shape: LayerShape, wanted: Tensor, length: int) -> None:
        self.shape, self._wanted, self._length = shape, wanted, length
        self.queries: list[Tensor] = []
        self.decode_queries: list[Tensor] = []
        self.decode_positions: list[Tensor] = []

    def take(self, queries: Tensor, start: int) -> None:
        """See queries [num_query_heads, num_new, head_dim] of consecutive positions."""
        stop = start + queries.shape[1]
        first, last = torch.searchsorted(self._wanted, torch.tensor([start, stop])).tolist()
        if first < last:
            self.queries.append(stored(queries[:, (self._wanted[first:last] - start).to(queries.device)]))
        if stop > self._length:
            behind = max(self._length - start, 0)
            self.decode_queries.append(stored(queries[:, behind:]))
            self.decode_positions.append(torch.arange(start + behind, stop))

    def fork(self) -> LayerRecord:
        """What was asked stays asked, whoever goes on."""
        return self

    def crop(self, length: int) -> None:
        """What was asked stays asked, whatever is forgotten of the cache."""


@dataclass(frozen=True)
class Listener(Dense):
    """Dense attention that writes down what it is asked.

    Attributes:
        wanted, length: as in ``LayerRecord``.
        records: by layer, of the layers that have been asked something.
    """

    wanted: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64), compare=False)
    length: int = 0
    records: dict[int, LayerRecord] = field(default_factory=dict, compare=False)

    def new_state(self, shape: LayerShape) -> LayerRecord:
        return self.records.setdefault(shape.layer, LayerRecord(shape, self.wanted, self.length))

    def observe(
        self, state: LayerRecord, shape: LayerShape, queries: Tensor | None, keys: Tensor, values: Tensor, start: int
    ) -> None:
        if queries is not None:  # None: the cache is only handed over to the next question
            state.take(queries, start)


def stored(tensor: Tensor) -> Tensor:
    """A copy as the file holds it."""
    return tensor.to("cpu", torch.bfloat16, copy=True).contiguous()
