"""Statistics of samples, and numbers as text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

LARGE = {"K": 1 << 10, "M": 1 << 20}
ON_ONE_LINE = 120  # characters of a record in a result file


def spread(samples: Sequence[float]) -> float:
    """Return the interquartile range over the median."""
    if len(samples) < 2:
        return 0.0
    first, _, third = quantiles(samples, n=4, method="inclusive")
    return (third - first) / median(samples)


def tokens(number: int) -> str:
    """Return 131072 as 128K."""
    for unit, size in reversed(LARGE.items()):
        if number >= size and number % size == 0:
            return f"{number // size}{unit}"
    return f"{number:,}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def document(result: dict[str, Any]) -> str:
    """Return a result as JSON for a file: indented, what is short and holds nothing nested on one line."""

    def joined(match: re.Match[str]) -> str:
        text = re.sub(r"\n\s*", " ", match[0])
        return text if len(text) <= ON_ONE_LINE or text[0] == "[" else match[0]

    return re.sub(r"\[[\s\d.,eE+-]+\]|\{[^{}\[\]]*\}", joined, json.dumps(result, indent=1))


def break_even(contexts: Sequence[int], dense: Sequence[float], sparse: Sequence[float]) -> float | None:
    """Return the tokens from which sparse stays faster, by linear interpolation between contexts.

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
