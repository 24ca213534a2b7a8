"""Tokens drawn from logits in host memory, and logits of tokens that may not come."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.native.loader import AVAILABLE, core


def takes_logits(logits: Tensor) -> bool:
    """Whether the compiled core is available and reads logits [vocabulary]."""
    return AVAILABLE and logits.is_cpu and logits.dtype == torch.float32 and logits.is_contiguous()


def draw(logits: Tensor, temperature: float, noise: int, limits: tuple[float, float, float]) -> tuple[int, float]:
    """Draw the token of one sequence, as ``engine.sampling.draw`` does but for the last digits of probabilities.

    Args:
        logits: float32 [vocabulary], which ``takes_logits``.
        temperature: above 0.
        noise: the sequence's random number, 0 or more.
        limits: top_p, the number of likeliest tokens that are drawn from, and min_p.

    Returns:
        The token, any unless the largest logit is finite; and that logit, NaN if any is.
    """
    top_p, most, min_p = limits
    token, best = core.draw(
        logits.data_ptr(), len(logits), temperature, noise, top_p, int(min(most, len(logits))), min_p
    )
    return int(token), float(best)


def exclude(logits: Tensor, may: Tensor) -> None:
    """Set logits [vocabulary], which ``takes_logits``, to -inf where a token's bit (``GrammarState.bits``) is 0."""
    assert may.is_contiguous()
    assert 32 * len(may) >= len(logits)
    core.exclude(logits.data_ptr(), len(logits), may.data_ptr())
