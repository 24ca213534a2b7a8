"""Tokens that every query of a row sees, held on the device of the model whatever the context's length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SLACK_TOKENS = 256  # that a window on the device may grow by before it is fetched again

Read = Callable[[int, int], tuple[Tensor, Tensor]]  # keys and values of positions start to stop, wherever they are


@dataclass
class _Run:
    """Consecutive tokens of a row: positions ``start`` to ``stop`` lie at the front of both buffers."""

    start: int
    stop: int
    keys: Tensor  # [num_kv_heads, capacity, head_dim]
    values: Tensor

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        tokens = slice(start - self.start, stop - self.start)
        return self.keys[:, tokens], self.values[:, tokens]


class Near:
    """Sinks and windows of the rows of one layer.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runs: dict[tuple[int, bool], _Run] = {}  # (row, whether it starts at position 0)

    def read(self, row: int, start: int, stop: int) -> tuple[Tensor, Tensor] | None:
        """Keys and values of positions start to stop, [num_kv_heads, stop - start, head_dim]; None if they are not
        all here."""
        run = self._runs.get((row, start == 0))
        return run.read(start, stop) if run is not None and run.start <= start and stop <= run.stop else None

    def fetch(self, row: int, start: int, stop: int, read: Read) -> tuple[Tensor, Tensor]:
        """Bring them here, in place of the sinks (``start`` 0) or the window that was."""
        capacity, buffers = stop - start + (SLACK_TOKENS if start else 0), []
        for tensor in read(start, stop):
            buffer = tensor.new_empty(len(tensor), capacity, tensor.shape[2], device=self._device)
            buffer[:, : stop - start] = tensor
            buffers.append(buffer)
        run = self._runs[row, start == 0] = _Run(start, stop, *buffers)
        return run.read(start, stop)

    def append(self, row: int, start: int, keys: Tensor, values: Tensor) -> None:
        """New tokens of a row, from position ``start`` on: its window grows, or is fetched again when it is needed."""
        run, stop = self._runs.get((row, False)), start + keys.shape[1]
        if run is None:
            return
        if run.stop != start or stop - run.start > run.keys.shape[1]:
            del self._runs[row, False]
            return
        for buffer, new in ((run.keys, keys), (run.values, values)):
            buffer[:, start - run.start : stop - run.start] = new
        run.stop = stop

    def crop(self, row: int, length: int) -> None:
        """Tokens of a row from position ``length`` on are gone."""
        self._runs = {place: run for place, run in self._runs.items() if place[0] != row or run.stop <= length}

    def clear(self) -> None:
        """Everything is gone."""
        self._runs.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        held = [tensor for run in self._runs.values() for tensor in (run.keys, run.values)]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)
