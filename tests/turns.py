"""Which combinations are tried where all of them would say the same: every value of each, not every pair."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

A, B = TypeVar("A"), TypeVar("B")


def in_turns(first: Iterable[A], second: Sequence[B]) -> list[tuple[A, B]]:
    """Each of the first with one of the second, which take turns; and all of the second with the first of the first."""
    pairs = [(each, second[index % len(second)]) for index, each in enumerate(first)]
    return pairs + [(pairs[0][0], each) for each in second[1:]]


def every_fourth(first: Sequence[A], second: Sequence[B]) -> list[tuple[A, B]]:
    """A quarter of all pairs, in which each value meets a quarter of the others; and all equal ones."""
    return [(a, b) for i, a in enumerate(first) for j, b in enumerate(second) if (i - j) % 4 == 0 or a == b]
