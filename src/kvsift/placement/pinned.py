"""Host memory that another device copies from and to on its own."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor


def pin(tensor: Tensor) -> Tensor:
    """Lock the pages of a tensor for as long as it lives; it stays as it is where that cannot be had.

    torch's own pinned tensors take the next power of two of bytes, twice what a long context needs.
    """
    runtime: Any = torch.cuda.cudart()
    address, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    if size and int(runtime.cudaHostRegister(address, size, 0)) == 0:
        weakref.finalize(tensor, runtime.cudaHostUnregister, address)
    return tensor
