"""Workspaces of the single launches for every size of a batch, in the same memory.

A graph is captured for each size, and between graphs any number of rows decodes. Launches run one after another, so
that sizes share what a workspace of their own would take many times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor

from kvsift.kernels.space_shapes import SpaceShape

Shapes = tuple[SpaceShape, ...]


class LaunchSpaces:
    """Memory for the largest of several workspaces of one kind.

    Args:
        kind: a named tuple of tensors.
        shapes: size of a batch -> shapes of its tensors; None if its launch does not run.
        sizes: of batches.
        device: of the memory.
    """

    def __init__(
        self, kind: type, shapes: Callable[[int], Shapes | None], sizes: Iterable[int], device: torch.device
    ) -> None:
        self._kind = kind
        self._shapes = {size: found for size in sizes if (found := shapes(size)) is not None}
        self._memory: list[Tensor] = []
        for each in zip(*self._shapes.values()):
            largest = max(prod(shape) for shape, _ in each)
            self._memory.append(torch.zeros(largest, dtype=each[0][1], device=device))

    @property
    def sizes(self) -> list[int]:
        """Of the batches whose launch runs."""
        return list(self._shapes)

    def of(self, size: int) -> Any:
        """Return the workspace for a batch; None if its launch does not run."""
        if size not in self._shapes:
            return None
        shapes = self._shapes[size]
        return self._kind(*(memory[: prod(shape)].view(shape) for memory, (shape, _) in zip(self._memory, shapes)))
