"""One over the length of every key: with it a cosine is a product with the keys as they are stored.

Normalised keys would double the memory of the keys, or cost a pass over all of them per chunk; this is 4 bytes per
token and KV head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.types import KVReader

SMALLEST_NORM = 1e-6


class KeyNorms:
    """Inverse norms of the keys of one sequence in one layer, worked out when they are asked for, in room that grows
    geometrically."""

    BYTES = 4  # per token and KV head

    def __init__(self) -> None:
        self.length = 0
        self._room: Tensor | None = None  # float32 [num_kv_heads, capacity]

    @torch.inference_mode()  # the room outlives the block it was made in
    def read(self, reader: KVReader, start: int, stop: int) -> Tensor:
        """Of the keys at positions start to stop, float32 [num_kv_heads, stop - start], a view."""
        if self.length < stop:
            self._append(reader.keys(self.length, stop), self.length)
        assert self._room is not None
        return reader.counted(self._room[:, start:stop])

    def _append(self, keys: Tensor, start: int) -> None:
        stop = start + keys.shape[1]
        if self._room is None or self._room.shape[1] < stop:
            room = keys.new_empty(keys.shape[0], max(stop, 2 * start), dtype=torch.float32)
            if self._room is not None:
                room[:, :start] = self._room[:, :start]
            self._room = room
        norms = torch.linalg.vector_norm(keys, dim=-1, dtype=torch.float32)
        self._room[:, start:stop] = norms.clamp_min_(SMALLEST_NORM).reciprocal_()
        self.length = stop

    def fork(self) -> KeyNorms:
        copy = KeyNorms()
        if self._room is not None:
            copy.length, copy._room = self.length, self._room[:, : self.length].clone()  # both will write on
        return copy

    def crop(self, length: int) -> None:
        self.length = min(self.length, length)
