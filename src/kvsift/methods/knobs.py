"""What hyper-parameters may be: each check refuses a value with what was given and what is possible."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from kvsift.errors import InputError


def whole(name: str, value: object, least: int, most: int | None = None, also: Sequence[str] = ()) -> None:
    """A whole number in a range; ``also`` are words that would do instead."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        limits = f"{least} or more" if most is None else f"{least} to {most}"
        words = "".join(f", or {word!r}" for word in also)
        raise InputError(f"{name}={value!r} must be a whole number, {limits}{words}.")


def one_of(name: str, value: object, choices: Sequence[str]) -> None:
    """One of a few words."""
    if value not in choices:
        *others, last = map(repr, choices)
        raise InputError(f"{name}={value!r} must be {', '.join(others)} or {last}.")


def flag(name: str, value: object) -> None:
    """True or false."""
    if not isinstance(value, bool):
        raise InputError(f"{name}={value!r} must be true or false.")


def share(name: str, value: object) -> None:
    """A number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InputError(f"{name}={value!r} must be a share: from 0 to 1.")


def prefilter(value: object, what: str) -> None:
    """How many times what is to be selected survives a coarse first look; 0 for none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (value == 0 or 1 <= value < inf):
        raise InputError(f"prefilter={value!r} must be 0 (score every {what}), or 1 or more. 8 is a good start.")
