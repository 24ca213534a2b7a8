"""Samples as one number, and numbers as text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any

LARGE = {"K": 1 << 10, "M": 1 << 20}


def spread(samples: Sequence[float]) -> float:
    """Interquartile range over the median."""
    if len(samples) < 2:
        return 0.0
    first, _, third = quantiles(samples, n=4, method="inclusive")
    return (third - first) / median(samples)


def tokens(number: int) -> str:
    """131072 -> 128K."""
    for unit, size in reversed(LARGE.items()):
        if number >= size and number % size == 0:
            return f"{number // size}{unit}"
    return f"{number:,}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def document(result: dict[str, Any]) -> str:
    """A result as JSON for a file: indented, but lists of numbers on one line."""
    text = json.dumps(result, indent=1)
    return re.sub(r"\[[\s\d.,eE+-]+\]", lambda found: " ".join(found[0].split()), text)
