"""Sampling: the choice of the next token from its logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from math import isfinite

import torch
from torch import Tensor

from kvsift.errors import InputError

BLOCK = 256  # random numbers drawn at once


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens.

    Attributes:
        temperature: 0 is greedy; higher is more random.
        top_p: draw from the most likely tokens that together reach this probability.
        seed: of the random numbers, which come from a generator of their own.
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

    def noise(self, stop: int, start: int = 0) -> Tensor:
        """Return a number in [0, 1) for each of the tokens start to stop, float64; the same on every device."""
        generator = torch.Generator().manual_seed(self.seed)
        blocks = [torch.rand(BLOCK, dtype=torch.float64, generator=generator) for _ in range(-(-stop // BLOCK))]
        return torch.cat([torch.empty(0, dtype=torch.float64), *blocks])[start:stop]

    def chooser(self, device: torch.device) -> Callable[[Tensor], int]:
        """Return a function from logits [vocabulary] to a token id, to be called once per token."""
        temperature, top_p = torch.tensor([[self.temperature], [self.top_p]], dtype=torch.float64, device=device)
        tokens, drawn = count(), self.noise(0)

        def choose(logits: Tensor) -> int:
            nonlocal drawn
            if self.temperature == 0:
                return int(logits.argmax())
            token = next(tokens)
            if token >= len(drawn):
                drawn = self.noise(2 * token + 1)
            return int(draw(logits.float().unsqueeze(0), temperature, top_p, drawn[token : token + 1].to(device)))

        return choose


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, noise: Tensor) -> Tensor:
    """Draw a token for every row: the one where the cumulative probability passes the row's random number.

    Args:
        logits: float32 [rows, vocabulary].
        temperature, top_p: float64 [rows]; temperature 0 chooses the likeliest.
        noise: float64 [rows], in [0, 1).

    Returns:
        int64 [rows].
    """
    order = logits.sort(dim=-1, descending=True, stable=True)
    wide = order.values.double()
    # differences are at most 0, so division by any positive temperature is safe
    divisor = torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    probability = ((wide - wide[:, :1]) / divisor).softmax(-1)
    nucleus = probability.masked_fill(probability.cumsum(-1) - probability >= top_p.unsqueeze(1), 0.0)
    cumulative = nucleus.cumsum(-1)
    rank = (cumulative <= noise.unsqueeze(1) * cumulative[:, -1:]).sum(-1).minimum((nucleus > 0).sum(-1) - 1)
    return order.indices.gather(1, torch.where(temperature > 0, rank, 0).unsqueeze(1)).squeeze(1)


def likeliest(logits: Tensor) -> Tensor:
    """Return the first of the largest logits; float [batch, vocabulary] -> int64 [batch].

    In two steps, since a GPU reduces each row on a single multiprocessor.
    """
    vocabulary = logits.shape[-1]
    parts = next(number for number in (256, 128, 64, 1) if vocabulary % number == 0)
    values, indices = logits.unflatten(-1, (parts, -1)).max(-1)
    part = values.argmax(-1, keepdim=True)
    return (part * (vocabulary // parts) + indices.gather(-1, part)).squeeze(-1)
