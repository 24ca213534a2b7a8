"""A second copy of the keys with a row per channel, for methods that read few channels of all tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.types import KVReader


class ChannelRows:
    """Keys of one sequence in one layer by channel, copied when they are read, in a buffer that grows."""

    def __init__(self) -> None:
        self.length = 0
        self._buffer: Tensor | None = None  # [num_kv_heads, head_dim, capacity], in the dtype of the keys

    @torch.inference_mode()  # the buffer outlives the caller's inference mode
    def read(self, reader: KVReader, stop: int, channels: Tensor) -> Tensor:
        """Chosen channels of the first ``stop`` keys, [num_kv_heads, count, stop].

        channels int64 [num_kv_heads, count].
        """
        if self.length < stop:
            self._append(reader.keys(self.length, stop))
        assert self._buffer is not None
        chosen = [rows[own, :stop] for rows, own in zip(self._buffer, channels)]
        return reader.counted(torch.stack(chosen))

    def _append(self, keys: Tensor) -> None:
        stop = self.length + keys.shape[1]
        if self._buffer is None or self._buffer.shape[2] < stop:
            buffer = keys.new_empty(keys.shape[0], keys.shape[2], max(stop, 2 * self.length))
            if self._buffer is not None:
                buffer[..., : self.length] = self._buffer[..., : self.length]
            self._buffer = buffer
        self._buffer[..., self.length : stop] = keys.mT
        self.length = stop

    def fork(self) -> ChannelRows:
        copy = ChannelRows()
        if self._buffer is not None:
            copy.length, copy._buffer = self.length, self._buffer[..., : self.length].clone()  # both append to it
        return copy

    def crop(self, length: int) -> None:
        self.length = min(self.length, length)
