"""Rows on their way from a device to host memory, without anybody waiting for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FEW_TOKENS = 64  # so many go through a buffer, and are written by the host once they are there

Sent = tuple[slice | Tensor, list[Tensor]]  # slots, and rows for each pool


class ToHost:
    """Copies from a device into pools of locked host memory; what was sent is there once ``settle`` returns, but for
    the few that it gives back."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None  # beside the one that computes
        self._arrived: torch.cuda.Event | None = None  # None: nothing is under way
        self._buffered: list[Sent] = []

    def send(self, pools: Sequence[Tensor], slots: slice | Tensor, rows: Sequence[Tensor]) -> None:
        """Rows of each pool, [num_kv_heads, num_new, width]; pools [num_kv_heads, num_slots, width]."""
        arrived = torch.cuda.Event()
        if rows[0].shape[1] < FEW_TOKENS or not isinstance(slots, slice):
            there = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in rows]
            for into, each in zip(there, rows):
                into.copy_(each.contiguous(), non_blocking=True)
            self._buffered.append((slots, there))
            arrived.record(torch.cuda.current_stream(rows[0].device))
            if self._arrived is not None:  # earlier ones may be on the other stream
                self._arrived.synchronize()
        else:
            self._send_many(pools, slots, [each.contiguous() for each in rows])
            assert self._stream is not None
            arrived.record(self._stream)
        self._arrived = arrived

    def _send_many(self, pools: Sequence[Tensor], slots: slice, rows: Sequence[Tensor]) -> None:
        stream = self.stream(rows[0].device)
        stream.wait_stream(torch.cuda.current_stream(rows[0].device))
        with torch.cuda.stream(stream):
            for pool, each in zip(pools, rows):
                # head by head: a copy between devices is asynchronous only if both sides are contiguous
                for into, of_head in zip(pool[:, slots], each):
                    into.copy_(of_head, non_blocking=True)
                each.record_stream(stream)

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Where many rows are copied, in both directions: what is read on it has arrived."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    @property
    def has_few(self) -> bool:
        """Whether some of it is in no pool before ``settle`` gives it back."""
        return bool(self._buffered)

    def settle(self) -> list[Sent]:
        """Wait for what is under way; rows that have come, to be written to the pools."""
        if self._arrived is not None:
            self._arrived.synchronize()
        self._arrived, buffered = None, self._buffered
        self._buffered = []
        return buffered
