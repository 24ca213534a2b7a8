"""Sinks and windows on the device of the model, of sequences whose KV is in host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SLACK_TOKENS = 256  # that a window on the device may grow by before it is copied again

Read = Callable[[int, int], tuple[Tensor, Tensor]]  # keys and values of positions start to stop


@dataclass
class _Span:
    """Consecutive tokens of a sequence: positions ``start`` to ``stop`` at the front of both buffers."""

    start: int
    stop: int
    keys: Tensor  # [num_kv_heads, capacity, head_dim]
    values: Tensor

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        tokens = slice(start - self.start, stop - self.start)
        return self.keys[:, tokens], self.values[:, tokens]


class ResidentSpans:
    """Sinks and windows of the sequences of one layer.

    Args:
        device: device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: dict[tuple[int, bool], _Span] = {}  # (sequence, whether it starts at position 0)

    def read(self, row: int, start: int, stop: int) -> tuple[Tensor, Tensor] | None:
        """Keys and values of positions start to stop, [num_kv_heads, stop - start, head_dim]; None if they are not
        all on the device."""
        span = self._spans.get((row, start == 0))
        return span.read(start, stop) if span is not None and span.start <= start and stop <= span.stop else None

    def fetch(self, row: int, start: int, stop: int, read: Read) -> tuple[Tensor, Tensor]:
        """Copy them to the device, in place of the previous sinks (``start`` 0) or window."""
        capacity, buffers = stop - start + (SLACK_TOKENS if start else 0), []
        for tensor in read(start, stop):
            buffer = tensor.new_empty(len(tensor), capacity, tensor.shape[2], device=self._device)
            buffer[:, : stop - start] = tensor
            buffers.append(buffer)
        span = self._spans[row, start == 0] = _Span(start, stop, *buffers)
        return span.read(start, stop)

    def append(self, row: int, start: int, keys: Tensor, values: Tensor) -> None:
        """New tokens of a sequence, from position ``start`` on: its window grows, or is copied again when it is
        needed."""
        span, stop = self._spans.get((row, False)), start + keys.shape[1]
        if span is None:
            return
        if span.stop != start or stop - span.start > span.keys.shape[1]:
            del self._spans[row, False]
            return
        for buffer, new in ((span.keys, keys), (span.values, values)):
            buffer[:, start - span.start : stop - span.start] = new
        span.stop = stop

    def crop(self, row: int, length: int) -> None:
        """Forget tokens of a sequence from position ``length`` on."""
        self._spans = {place: span for place, span in self._spans.items() if place[0] != row or span.stop <= length}

    def clear(self) -> None:
        """Forget everything."""
        self._spans.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        tensors = [tensor for span in self._spans.values() for tensor in (span.keys, span.values)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
