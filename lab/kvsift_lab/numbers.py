"""Statistics of samples, and numbers as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from statistics import median, quantiles
from typing import Any

LARGE = {"K": 1 << 10, "M": 1 << 20}


def spread(samples: Sequence[float]) -> float:
    """Return the interquartile range over the median."""
    if len(samples) < 2:
        return 0.0
    first, _, third = quantiles(samples, n=4, method="inclusive")
    return (third - first) / median(samples)


def digits(found: Any, count: int = 5) -> Any:
    """Return numbers, in lists and dictionaries too, with so many significant digits, for a result file."""
    if isinstance(found, float):
        return float(f"{found:.{count}g}")
    if isinstance(found, dict):
        return {key: digits(value, count) for key, value in found.items()}
    if isinstance(found, Iterable) and not isinstance(found, str):
        return [digits(value, count) for value in found]
    return found


def grouped(items: Iterable[Any], *keys: str) -> dict[Any, list[Any]]:
    """Return records by the value of a key, or by the values of several, in their order."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(itemgetter(*keys)(item), []).append(item)
    return groups


def tokens(number: int) -> str:
    """Return 131072 as 128K."""
    for unit, size in reversed(LARGE.items()):
        if number >= size and number % size == 0:
            return f"{number // size}{unit}"
    return f"{number:,}"


def table(columns: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    heads, *lines = [f"| {' | '.join(map(str, cells))} |" for cells in (columns, *rows)]
    return "\n".join([heads, "|---" * len(columns) + "|", *lines])
