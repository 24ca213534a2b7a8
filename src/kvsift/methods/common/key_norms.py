"""Inverse norms of the keys: a cosine is a product with the stored keys, times the inverse norm.

Normalised keys would double the memory of the keys, or cost a pass over all of them per chunk; a norm takes 4 bytes per
token and KV head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.types import KVReader

SMALLEST_NORM = 1e-6


class KeyNorms:
    """Inverse norms of one sequence in one layer, computed when they are read, in a buffer that grows geometrically."""

    BYTES = 4  # per token and KV head

    def __init__(self) -> None:
        self.length = 0
        self._buffer: Tensor | None = None  # float32 [num_kv_heads, capacity]

    @torch.inference_mode()  # the buffer outlives the caller's inference mode
    def read(self, reader: KVReader, start: int, stop: int) -> Tensor:
        """Inverse norms of the keys at positions start to stop, float32 [num_kv_heads, stop - start], a view."""
        if self.length < stop:
            self._append(reader.keys(self.length, stop), self.length)
        assert self._buffer is not None
        return reader.counted(self._buffer[:, start:stop])

    def _append(self, keys: Tensor, start: int) -> None:
        stop = start + keys.shape[1]
        if self._buffer is None or self._buffer.shape[1] < stop:
            buffer = keys.new_empty(keys.shape[0], max(stop, 2 * start), dtype=torch.float32)
            if self._buffer is not None:
                buffer[:, :start] = self._buffer[:, :start]
            self._buffer = buffer
        norms = torch.linalg.vector_norm(keys, dim=-1, dtype=torch.float32)
        self._buffer[:, start:stop] = norms.clamp_min_(SMALLEST_NORM).reciprocal_()
        self.length = stop

    def fork(self) -> KeyNorms:
        copy = KeyNorms()
        if self._buffer is not None:
            copy.length, copy._buffer = self.length, self._buffer[:, : self.length].clone()  # both append to it
        return copy

    def crop(self, length: int) -> None:
        self.length = min(self.length, length)
