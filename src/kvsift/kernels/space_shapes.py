"""Workspaces of launches as shapes, for callers that keep many in one memory."""

from __future__ import annotations

import torch
from torch import Tensor

SpaceShape = tuple[tuple[int, ...], torch.dtype]


def new_space(shapes: tuple[SpaceShape, ...], device: torch.device) -> list[Tensor]:
    """Return tensors of these shapes. Flags must be zero, and the whole is small, so all are."""
    return [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes]
