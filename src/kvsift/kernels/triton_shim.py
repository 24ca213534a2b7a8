"""Triton where there is one: kernels import from here, so that every file imports on machines without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

try:
    import triton
    import triton.language as tl

    HAVE_TRITON = True
except ImportError:  # macOS, Windows, CPU builds of torch
    triton, tl, HAVE_TRITON = None, None, False


def jit(function: Callable[..., Any]) -> Any:
    """``triton.jit``; without Triton the function itself, which nobody calls."""
    return triton.jit(function) if HAVE_TRITON else function


def runs_on_triton(tensor: Tensor) -> bool:
    """Whether a twin should take this tensor: Triton is here, and the tensor is on an NVIDIA GPU."""
    return HAVE_TRITON and tensor.is_cuda


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below ``number``."""
    return 1 << max(number - 1, 0).bit_length()
