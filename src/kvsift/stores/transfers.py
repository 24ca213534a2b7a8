"""Copies between a device and page-locked host memory, in the background."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FEW_TOKENS = 64  # fewer go through a buffer and are written to the pools by the host

Sent = tuple[slice | Tensor, list[Tensor]]  # slots, and rows for each pool


def pin(tensor: Tensor) -> Tensor:
    """Lock the pages of a tensor while it exists, so that a device copies them on its own; leave it as it is where the
    system refuses.

    torch's own pinned tensors take the next power of two of bytes, twice what a long context needs.
    """
    runtime: Any = torch.cuda.cudart()
    address, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    if size and int(runtime.cudaHostRegister(address, size, 0)) == 0:
        weakref.finalize(tensor, runtime.cudaHostUnregister, address)
    return tensor


class HostTransfers:
    """Asynchronous copies from a device into page-locked pools: complete once ``settle`` returns, except for the small
    ones, which it returns for the host to write."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None  # beside the one that computes
        self._arrived: torch.cuda.Event | None = None  # None: no copy is pending
        self._buffered: list[Sent] = []

    def send(self, pools: Sequence[Tensor], slots: slice | Tensor, rows: Sequence[Tensor]) -> None:
        """Rows of each pool, [num_kv_heads, num_new, width]; pools [num_kv_heads, num_slots, width]."""
        arrived = torch.cuda.Event()
        if rows[0].shape[1] < FEW_TOKENS or not isinstance(slots, slice):
            buffers = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in rows]
            for buffer, tensor in zip(buffers, rows):
                buffer.copy_(tensor.contiguous(), non_blocking=True)
            self._buffered.append((slots, buffers))
            arrived.record(torch.cuda.current_stream(rows[0].device))
            if self._arrived is not None:  # earlier ones may be on the other stream
                self._arrived.synchronize()
        else:
            self._send_many(pools, slots, [tensor.contiguous() for tensor in rows])
            assert self._stream is not None
            arrived.record(self._stream)
        self._arrived = arrived

    def _send_many(self, pools: Sequence[Tensor], slots: slice, rows: Sequence[Tensor]) -> None:
        stream = self.stream(rows[0].device)
        stream.wait_stream(torch.cuda.current_stream(rows[0].device))
        with torch.cuda.stream(stream):
            for pool, tensor in zip(pools, rows):
                # head by head: a copy between devices is asynchronous only if both sides are contiguous
                for target, source in zip(pool[:, slots], tensor):
                    target.copy_(source, non_blocking=True)
                tensor.record_stream(stream)

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream of large copies in both directions: whatever runs on it sees them complete."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    @property
    def has_buffered(self) -> bool:
        """Whether some rows are in no pool until ``settle`` returns them."""
        return bool(self._buffered)

    def settle(self) -> list[Sent]:
        """Wait for all copies; the buffered rows, to be written to the pools."""
        if self._arrived is not None:
            self._arrived.synchronize()
        self._arrived, buffered = None, self._buffered
        self._buffered = []
        return buffered
