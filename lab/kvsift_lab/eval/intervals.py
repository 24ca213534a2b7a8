"""95 % intervals of mean scores: Wilson's for shares, the bootstrap for other scores.

Scores of questions about one context are correlated. They therefore count as fewer questions, by Kish's design effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import fmean

RESAMPLES = 2000
SEED = 20_240_614


def interval(scores: Sequence[float], effect: float = 1.0) -> tuple[float, float]:
    """Return the interval of the mean of scores from 0 to 1: Wilson's if each is 0 or 1, else a seeded bootstrap.

    ``effect`` scores count as one (``design_effect``).
    """
    if all(score in (0, 1) for score in scores):
        return wilson(sum(scores) / effect, len(scores) / effect)
    mean, widened = fmean(scores), sqrt(effect)
    low, high = bootstrap(scores)
    return max(0.0, mean - widened * (mean - low)), min(1.0, mean + widened * (high - mean))


def design_effect(cells: Iterable[Sequence[Sequence[float]]]) -> float | None:
    """Return how many questions in shared contexts count as one independent question, at least 1.

    The variance of a mean given the differences between contexts, over its variance if all questions were independent,
    pooled over cells. None if no cell has two contexts.

    Args:
        cells: the scores of each cell, by context.
    """
    cells = [contexts for contexts in cells if len(contexts) > 1]
    if not cells:
        return None
    by_context = by_question = 0.0
    for contexts in cells:
        scores = [score for context in contexts for score in context]
        count, num_contexts, mean = len(scores), len(contexts), fmean(scores)
        sums = [sum(score - mean for score in context) for context in contexts]
        variance = sum(total * total for total in sums) / count**2 * num_contexts / (num_contexts - 1)  # of the mean
        by_context += variance
        # the spread around the sample mean is smaller than the variance of a score, by the variance of that mean
        by_question += (sum((score - mean) ** 2 for score in scores) / count + variance) / count
    return max(1.0, by_context / by_question) if by_question else 1.0


def wilson(successes: float, trials: float) -> tuple[float, float]:
    """Return Wilson's interval of a share, of 95 %."""
    z, share = 1.96, successes / trials
    centre = share + z * z / (2 * trials)
    spread = z * sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def bootstrap(scores: Sequence[float]) -> tuple[float, float]:
    """Return the middle 95 % of bootstrap means; the same for the same scores."""
    import torch

    values = torch.tensor(scores, dtype=torch.float64)
    generator = torch.Generator().manual_seed(SEED)
    draws = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
    low, high = values[draws].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
