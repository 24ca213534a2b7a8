"""Where twins are tested: compiled on a GPU, else in Triton's interpreter, which cannot do bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvsift.kernels.triton_shim import HAVE_TRITON

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.float32, *([torch.bfloat16] if DEVICE == "cuda" else [])]

needs_triton = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed on this platform")


def far_memory(folder: Path, size: int, dtype: torch.dtype) -> Tensor:
    """``size`` zeros, more than offsets of 32 bits reach.

    Off a GPU they lie in a sparse file, which takes no room, behind 2^31 others: an offset that has wrapped around
    reads these instead of crashing.
    """
    if DEVICE == "cuda":
        if torch.cuda.mem_get_info()[0] < 2 * size * dtype.itemsize:
            pytest.skip(f"needs {2 * size * dtype.itemsize >> 30} GiB of GPU memory")
        return torch.zeros(size, dtype=dtype, device=DEVICE)
    before = 1 << 31
    return torch.from_file(str(folder / "zeros"), shared=True, size=before + size, dtype=dtype)[before:]
