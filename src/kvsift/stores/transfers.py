"""Page-locked host memory: copies between it and a device in the background, and the device's own view of it."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

FEW_TOKENS = 64  # fewer go through a buffer and are written to the pools by the host
PORTABLE = 1  # cudaHostAllocPortable

Sent = tuple[slice | Tensor, list[Tensor]]  # slots, and rows for each pool


def pinned_empty(like: Tensor, sizes: Sequence[int], device: torch.device) -> Tensor:
    """An uninitialised host tensor of the dtype of ``like`` whose pages are locked while it exists, so that ``device``
    reads and writes them on its own; not locked (``is_pinned``) where the system refuses.

    torch's own pinned tensors take the next power of two of bytes, twice what a long context needs. Locking the pages
    of an ordinary tensor is refused by some containers that lock what the driver allocates itself.
    """
    num_bytes = prod(sizes) * like.element_size()
    memory = _locked(num_bytes, device)
    return (torch.empty(num_bytes, dtype=torch.uint8) if memory is None else memory).view(like.dtype).view(*sizes)


def _locked(num_bytes: int, device: torch.device) -> Tensor | None:
    """Allocate page-locked memory, which every device may use; None where the system refuses."""
    runtime: Any = ctypes.CDLL(None) if sys.platform == "linux" else None  # torch has loaded CUDA's runtime
    if not num_bytes or not hasattr(runtime, "cudaHostAlloc"):
        return None
    address = ctypes.c_void_p()
    with torch.cuda.device(device):
        if runtime.cudaHostAlloc(ctypes.byref(address), ctypes.c_size_t(num_bytes), PORTABLE) != 0:
            runtime.cudaGetLastError()  # or torch would raise it at its next launch
            return None
    assert address.value is not None
    memory = (ctypes.c_uint8 * num_bytes).from_address(address.value)
    weakref.finalize(memory, runtime.cudaFreeHost, address).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


class _Mapped:
    """Bytes of a page-locked tensor, as CUDA's array interface shows them to torch; it keeps the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        num_bytes = tensor.numel() * tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 2,
        }  # fmt: skip


def mapped(tensor: Tensor, device: torch.device) -> Tensor:
    """A contiguous page-locked host tensor as a tensor of ``device``, whose kernels read and write it over the bus.

    Host and device have one address space, so nothing is copied; the host sees what kernels wrote once they are done.
    """
    view = torch.as_tensor(_Mapped(tensor), device=device)
    assert view.data_ptr() == tensor.data_ptr(), "torch made a copy"
    return view.view(tensor.dtype).view(tensor.shape)


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
