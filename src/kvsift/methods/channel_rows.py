"""A second copy of the keys with a row per channel, for methods that read few channels of all tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.types import KVReader


class ChannelRows:
    """Keys of one sequence in one layer by channel, copied when they are asked for, in room that grows."""

    def __init__(self) -> None:
        self.length = 0
        self._room: Tensor | None = None  # [num_kv_heads, head_dim, capacity], in the dtype of the keys

    @torch.inference_mode()  # the room outlives the block it was made in
    def read(self, reader: KVReader, stop: int, channels: Tensor) -> Tensor:
        """Chosen channels of the first ``stop`` keys, [num_kv_heads, count, stop].

        channels int64 [num_kv_heads, count].
        """
        if self.length < stop:
            self._append(reader.keys(self.length, stop))
        assert self._room is not None
        chosen = [rows[own, :stop] for rows, own in zip(self._room, channels)]
        return reader.counted(torch.stack(chosen))

    def _append(self, keys: Tensor) -> None:
        stop = self.length + keys.shape[1]
        if self._room is None or self._room.shape[2] < stop:
            room = keys.new_empty(keys.shape[0], keys.shape[2], max(stop, 2 * self.length))
            if self._room is not None:
                room[..., : self.length] = self._room[..., : self.length]
            self._room = room
        self._room[..., self.length : stop] = keys.mT
        self.length = stop

    def fork(self) -> ChannelRows:
        copy = ChannelRows()
        if self._room is not None:
            copy.length, copy._room = self.length, self._room[..., : self.length].clone()  # both will write on
        return copy

    def crop(self, length: int) -> None:
        self.length = min(self.length, length)
