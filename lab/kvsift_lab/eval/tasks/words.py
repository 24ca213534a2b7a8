"""Keys and lists of several tasks."""

import random
from collections.abc import Callable, Iterator, Sequence
from uuid import UUID

from kvsift.texts.words import DEFAULT


def two_words(rng: random.Random) -> str:
    return f"{rng.choice(DEFAULT.adjectives)}-{rng.choice(DEFAULT.nouns)}"


def uuid(rng: random.Random) -> str:
    """Return a random (version 4) UUID."""
    return str(UUID(int=rng.getrandbits(128), version=4))


def listed(items: Sequence[str]) -> str:
    """ "a", "a and b" or "a, b, and c"."""
    head, last = ", ".join(items[:-1]), items[-1]
    return f"{head}{',' if len(items) > 2 else ''} and {last}" if head else last


def endless(rng: random.Random, make: Callable[[random.Random], str]) -> Iterator[str]:
    """Yield different results of ``make(rng)``."""
    used: set[str] = set()
    while True:
        if (result := make(rng)) not in used:
            used.add(result)
            yield result
