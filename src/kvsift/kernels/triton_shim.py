"""Triton where it can run; kernels import it from here, so that every file imports on machines without it.

A build of torch without CUDA runs no kernel, so Triton, whose import takes 0.2 s, is left out there, unless
TRITON_INTERPRET asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

try:
    if torch.version.cuda is None and "TRITON_INTERPRET" not in os.environ:
        raise ImportError
    import triton
    import triton.language as tl

    HAVE_TRITON = True
except ImportError:  # macOS, Windows, CPU builds of torch
    triton, tl, HAVE_TRITON = None, None, False


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def jit(function: Callable[..., Any]) -> Any:
    """``triton.jit``; without Triton the function itself, which is never called."""
    return jit_for_any()(function)


def jit_for_any(*integers: str) -> Callable[[Callable[..., Any]], Any]:
    """``jit`` of a kernel that is not compiled again for values of these integers that are 1 or divide by 16."""
    return triton.jit(do_not_specialize=integers) if HAVE_TRITON else lambda function: function


def constant(number: float) -> Any:
    """A module's number that kernels may read."""
    return tl.constexpr(number) if HAVE_TRITON else number


def runs_on_triton(tensor: Tensor) -> bool:
    """Whether a twin takes this tensor: Triton is installed, and the tensor is on an NVIDIA GPU."""
    return HAVE_TRITON and tensor.is_cuda


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below ``number``."""
    return 1 << max(number - 1, 0).bit_length()
