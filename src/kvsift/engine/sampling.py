"""Choosing the next token from its logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from kvsift.errors import InputError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: 0 is greedy; higher is more random.
        top_p: only the most likely tokens that together reach this probability are drawn from.
        seed: of the draw, on its own generator.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not isfinite(self.temperature) or self.temperature < 0:
            raise InputError(f"temperature={self.temperature} must be a number, 0 (greedy) or more.")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p={self.top_p} must be greater than 0 and at most 1.")
        if not 0 <= self.seed < 1 << 63:
            raise InputError(f"seed={self.seed} must be a whole number, 0 or more and below 2**63.")

    def chooser(self, device: torch.device) -> Callable[[Tensor], int]:
        """A function from logits [vocabulary] to a token id; each has its own stream of random numbers."""
        generator = torch.Generator(device).manual_seed(self.seed)

        def choose(logits: Tensor) -> int:
            if self.temperature == 0:
                return int(logits.argmax())
            wide = logits.double()
            # at most 0, so that no temperature is too low to divide by
            order = ((wide - wide.max()) / self.temperature).softmax(-1).sort(descending=True)
            kept = order.values.masked_fill(order.values.cumsum(-1) - order.values >= self.top_p, 0.0)
            return int(order.indices[kept.multinomial(1, generator=generator)])

        return choose
