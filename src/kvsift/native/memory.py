"""Huge pages for tensors that are read as a whole."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from kvsift.errors import InvalidTensor
from kvsift.native.loader import core

HUGE_PAGE = 1 << 21  # bytes
ROOM = 1 << 25  # bytes that are taken from the system at once, and get pages when they are written


def advise_huge(tensor: Tensor) -> int:
    """Request huge pages for the storage of a CPU tensor -> bytes of the request, 0 if the system has no such pages.

    It works best before the tensor is first written.
    """
    if tensor.device.type != "cpu":
        raise InvalidTensor(f"the tensor is on {tensor.device}; huge pages are for CPU tensors only.")
    storage = tensor.untyped_storage()
    return int(core.advise_huge(storage.data_ptr(), storage.nbytes()))


def huge_empty(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an unwritten tensor on the CPU, on huge pages where it has several and the system grants them.

    Its memory is fresh: what was used before stays on small pages, and reads of many of those wait for their addresses.
    """
    num_bytes = math.prod(sizes) * dtype.itemsize
    if num_bytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(sizes, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(sizes)


class HugeRoom:
    """Memory for many tensors that live as long as each other, next to each other on huge pages."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, sizes: Sequence[int]) -> Tensor:
        """Return an unwritten uint8 tensor, 64 bytes aligned."""
        num_bytes = math.prod(sizes)
        taken = -(-num_bytes // 64) * 64
        if taken > len(self._free):
            self._free = huge_empty([max(taken, ROOM)], torch.uint8)
        memory, self._free = self._free[:num_bytes], self._free[taken:]
        return memory.view(*sizes)
