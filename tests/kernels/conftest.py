"""Where twins are tested: compiled on a GPU, else in Triton's interpreter, which cannot do bfloat16."""

from __future__ import annotations

import pytest
import torch

from kvsift.kernels.triton_shim import HAVE_TRITON

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.float32, *([torch.bfloat16] if DEVICE == "cuda" else [])]

needs_triton = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed on this platform")
