"""From which context on sparse attention is faster."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def break_even(contexts: Sequence[int], dense: Sequence[float], sparse: Sequence[float]) -> float | None:
    """Tokens from which sparse is faster for good, by straight lines between neighbouring contexts.

    Args:
        contexts: ascending.
        dense, sparse: seconds at these contexts.

    Returns:
        The length; 0 if sparse is faster at the shortest context and all others, None if it is not at the longest.
    """
    points = [(context, d - s) for context, d, s in zip(contexts, dense, sparse)]
    if not points or points[-1][1] <= 0:
        return None
    for (short, loss), (long, gain) in reversed(list(pairwise(points))):
        if loss <= 0:
            return short + (long - short) * -loss / (gain - loss)
    return 0.0
