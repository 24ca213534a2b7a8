"""95 % intervals of mean scores: Wilson's for shares, resampling for anything else.

Questions of one context stand or fall together: a context that hides its facts well hides all of them. So they count as
fewer than they are, by Kish's design effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import fmean

RESAMPLES = 2000
SEED = 20_240_614


def interval(scores: Sequence[float], effect: float = 1.0) -> tuple[float, float]:
    """Around the mean of scores from 0 to 1: Wilson's if each is 0 or 1, else from resampling with a fixed seed.

    ``effect`` of them count as one (``design_effect``).
    """
    if all(score in (0, 1) for score in scores):
        return wilson(sum(scores) / effect, len(scores) / effect)
    mean, widened = fmean(scores), sqrt(effect)
    low, high = bootstrap(scores)
    return max(0.0, mean - widened * (mean - low)), min(1.0, mean + widened * (high - mean))


def design_effect(cells: Iterable[Sequence[Sequence[float]]]) -> float | None:
    """How many questions of the contexts at hand say as much as one of a context of its own, at least 1.

    That is the variance of a mean by what contexts differ over what it were if all questions were independent, pooled
    over cells, whose plans all ask in the same contexts. None if no cell has two contexts: then nobody knows.

    Args:
        cells: the scores of each, by context.
    """
    by_context = by_question = 0.0
    known = False
    for contexts in cells:
        scores = [score for context in contexts for score in context]
        count, num_contexts, mean = len(scores), len(contexts), fmean(scores)
        if num_contexts < 2:
            continue
        known = True
        sums = [sum(score - mean for score in context) for context in contexts]
        of_mean = sum(each * each for each in sums) / count**2 * num_contexts / (num_contexts - 1)
        by_context += of_mean
        # scores scatter around their own mean by less than they vary: by the variance of that mean
        by_question += (sum((score - mean) ** 2 for score in scores) / count + of_mean) / count
    if not known:
        return None
    return max(1.0, by_context / by_question) if by_question else 1.0


def wilson(successes: float, trials: float, z: float = 1.96) -> tuple[float, float]:
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
