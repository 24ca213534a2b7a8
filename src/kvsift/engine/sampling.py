"""Sampling: the choice of the next token from its logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite

import torch
from torch import Tensor

from kvsift.errors import InputError

BLOCK = 256  # random numbers drawn at once
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # constants of SplitMix64, as signed numbers
MIXERS = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


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
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 63:
            raise InputError(f"seed={self.seed} must be a whole number, 0 or more and below 2**63.")

    def nth(self, number: int) -> Sampling:
        """The sampling of one of several answers: the first one's is this, and no two that begin at seeds side by side
        share one."""
        if number == 0:
            return self
        mixed = self.seed + number * GOLDEN & (1 << 64) - 1
        for shift, factor in ((30, MIXERS[0]), (27, MIXERS[1])):  # SplitMix64
            mixed = (mixed ^ mixed >> shift) * factor & (1 << 64) - 1
        return replace(self, seed=(mixed ^ mixed >> 31) >> 1)

    def noise(self, stop: int, start: int = 0) -> Tensor:
        """Return a random whole number for each of the tokens start to stop, int64; the same on every device."""
        generator = torch.Generator().manual_seed(self.seed)
        blocks = [torch.randint(1 << 62, (BLOCK,), generator=generator) for _ in range(-(-stop // BLOCK))]
        return torch.cat([torch.empty(0, dtype=torch.int64), *blocks])[start:stop]

    def chooser(self, device: torch.device) -> Chooser:
        """Return what chooses the tokens of one answer."""
        return Chooser(self, device)


class Chooser:
    """Chooses the tokens of one answer, each with a random number of its own.

    Args:
        sampling: how.
        device: of the logits.
    """

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self._sampling, self._device = sampling, device
        numbers = [[sampling.temperature], [sampling.top_p]]
        self._temperature, self._top_p = torch.tensor(numbers, dtype=torch.float64, device=device)
        self._token, self._drawn = 0, sampling.noise(0)

    def __call__(self, logits: Tensor) -> int:
        """The next token, from logits [vocabulary]; to be called once per token."""
        token = self.foresee(logits, 0)
        self._token += 1
        return token

    def foresee(self, logits: Tensor, ahead: int) -> int:
        """The token that these logits would give ``ahead`` calls from now."""
        if self._sampling.temperature == 0:
            return int(logits.argmax())
        token = self._token + ahead
        if token >= len(self._drawn):
            self._drawn = self._sampling.noise(2 * token + 1)
        noise = self._drawn[token : token + 1].to(self._device)
        return int(draw(logits.float().unsqueeze(0), self._temperature, self._top_p, noise))


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, noise: Tensor) -> Tensor:
    """Draw a token for every row: the largest logarithm of a probability plus Gumbel noise of its own.

    The noise of a token is made of the row's random number and the token alone, so that two rows of nearly the same
    logits and the same number nearly always draw the same token: drafts of exact decoding come true.

    Args:
        logits: float32 [rows, vocabulary].
        temperature, top_p: float64 [rows]; temperature 0 chooses the likeliest.
        noise: int64 [rows], random.

    Returns:
        int64 [rows].
    """
    order = logits.sort(dim=-1, descending=True, stable=True)
    wide = order.values.double()
    # differences are at most 0, so division by any positive temperature is safe
    divisor = torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    probability = ((wide - wide[:, :1]) / divisor).softmax(-1)
    outside = probability.cumsum(-1) - probability >= top_p.unsqueeze(1)
    noisy = probability.log() + gumbel(noise.unsqueeze(1), order.indices)
    rank = torch.where(temperature > 0, noisy.masked_fill(outside, -torch.inf).argmax(-1), 0)
    return order.indices.gather(1, rank.unsqueeze(1)).squeeze(1)


def gumbel(noise: Tensor, tokens: Tensor) -> Tensor:
    """Return Gumbel noise for tokens by random numbers, both int64 and of shapes that broadcast; float64.

    The numbers are mixed as in SplitMix64 (https://doi.org/10.1145/2714064.2660195).
    """
    mixed = noise + (tokens + 1) * GOLDEN
    for shift, factor in ((30, MIXERS[0]), (27, MIXERS[1])):
        mixed = (mixed ^ (mixed >> shift & (1 << 64 - shift) - 1)) * factor
    mixed = mixed ^ (mixed >> 31 & (1 << 33) - 1)
    uniform = ((mixed >> 11 & (1 << 53) - 1).double() + 0.5) / (1 << 53)
    return -(-uniform.log()).log()


def likeliest(logits: Tensor) -> Tensor:
    """Return the first of the largest logits; float [batch, vocabulary] -> int64 [batch].

    In two steps, since a GPU reduces each row on a single multiprocessor.
    """
    vocabulary = logits.shape[-1]
    parts = next(number for number in (256, 128, 64, 1) if vocabulary % number == 0)
    values, indices = logits.unflatten(-1, (parts, -1)).max(-1)
    part = values.argmax(-1, keepdim=True)
    return (part * (vocabulary // parts) + indices.gather(-1, part)).squeeze(-1)
