"""95 % intervals of mean scores: Wilson's for shares, resampling for anything else."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

RESAMPLES = 2000
SEED = 20_240_614


def interval(scores: Sequence[float]) -> tuple[float, float]:
    """Around the mean of scores from 0 to 1: Wilson's if each is 0 or 1, else from resampling with a fixed seed."""
    if all(score in (0, 1) for score in scores):
        return wilson(int(sum(scores)), len(scores))
    return bootstrap(scores)


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share."""
    share = successes / trials
    centre = share + z * z / (2 * trials)
    spread = z * sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def bootstrap(scores: Sequence[float]) -> tuple[float, float]:
    """The middle 95 % of the means of samples drawn with replacement; the same for the same scores."""
    import torch

    values = torch.tensor(scores, dtype=torch.float64)
    generator = torch.Generator().manual_seed(SEED)
    draws = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
    low, high = values[draws].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
