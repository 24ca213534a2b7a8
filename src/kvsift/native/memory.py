"""The speed at which this machine reads memory, and huge pages for tensors that are read as a whole."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.errors import InvalidTensor, InvalidValue
from kvsift.native.loader import AVAILABLE, core, num_threads


def bandwidth(size: int = 1 << 29, threads: int | None = None) -> float:
    """Bytes per second, in units of 1e9, of reading ``size`` bytes once from memory, the best of three.

    ``size`` should exceed the last cache by far; the buffer is on huge pages where the system grants them.
    """
    if size < 1:
        raise InvalidValue(f"size={size} must be at least one byte.")
    buffer = torch.empty(size, dtype=torch.uint8)
    advise_huge(buffer)
    buffer.fill_(1)
    seconds = min(core.read_seconds(buffer.data_ptr(), size, num_threads(threads)) for _ in range(3))
    return size / seconds / 1e9


def advise_huge(tensor: Tensor) -> int:
    """Request huge pages for the storage of a CPU tensor -> bytes of the request, 0 without such pages or the core.

    It works best before the tensor is first written.
    """
    if tensor.device.type != "cpu":
        raise InvalidTensor(f"the tensor is on {tensor.device}; huge pages are for CPU tensors only.")
    storage = tensor.untyped_storage()
    return int(core.advise_huge(storage.data_ptr(), storage.nbytes())) if AVAILABLE else 0
