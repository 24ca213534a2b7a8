"""A dense method that records queries: a sample of those of the prompt, and all later ones."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvsift.methods.dense import Dense
from kvsift.types import LayerShape

RECENT = 256  # queries at the end of the document, always recorded


def sample_positions(length: int, capacity: int) -> Tensor:
    """Return at most ``capacity`` positions of prompt queries: evenly spaced, then all recent ones; int64, sorted."""
    recent = min(RECENT, capacity // 2)
    if length <= capacity:
        return torch.arange(length)
    stride = -(-(length - recent) // (capacity - recent))
    return torch.cat([torch.arange(0, length - recent, stride), torch.arange(length - recent, length)])


class LayerRecord:
    """Recorded queries of one layer.

    Args:
        shape: of the layer.
        positions: int64, ascending; positions of the document to record.
        length: tokens of the document; all queries from there on are recorded.
    """

    def __init__(self, shape: LayerShape, positions: Tensor, length: int) -> None:
        self.shape, self._positions, self._length = shape, positions, length
        self.queries: list[Tensor] = []
        self.decode_queries: list[Tensor] = []
        self.decode_positions: list[Tensor] = []

    def take(self, queries: Tensor, start: int) -> None:
        """Record queries [num_query_heads, num_new, head_dim] of consecutive positions."""
        stop = start + queries.shape[1]
        first, last = torch.searchsorted(self._positions, torch.tensor([start, stop])).tolist()
        if first < last:
            self.queries.append(file_copy(queries[:, (self._positions[first:last] - start).to(queries.device)]))
        if stop > self._length:
            behind = max(self._length - start, 0)
            self.decode_queries.append(file_copy(queries[:, behind:]))
            self.decode_positions.append(torch.arange(start + behind, stop))

    def fork(self) -> LayerRecord:
        """Return the same record: all questions add to it."""
        return self

    def crop(self, length: int) -> None:
        """Keep all queries when the cache is rolled back."""


@dataclass(frozen=True)
class RecordingDense(Dense):
    """Dense attention that records queries.

    Attributes:
        positions, length: as in ``LayerRecord``.
        records: by layer.
    """

    positions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64), compare=False)
    length: int = 0
    records: dict[int, LayerRecord] = field(default_factory=dict, compare=False)

    def new_state(self, shape: LayerShape) -> LayerRecord:
        return self.records.setdefault(shape.layer, LayerRecord(shape, self.positions, self.length))

    def observe(
        self, state: LayerRecord, shape: LayerShape, queries: Tensor | None, keys: Tensor, values: Tensor, start: int
    ) -> None:
        if queries is not None:  # None: the cache is only copied for the next question
            state.take(queries, start)


def file_copy(tensor: Tensor) -> Tensor:
    """Return a copy in the format of the file."""
    return tensor.to("cpu", torch.bfloat16, copy=True).contiguous()
