"""Filler around needles: repeated sentences of noise, or prose."""

import random
from collections.abc import Iterator

from kvsift.texts.prose import NOISE, prose


def noise(rng: random.Random) -> Iterator[str]:
    """Yield a few sentences of noise in the same order again and again, each with a space in front."""
    chosen = rng.sample(NOISE, rng.randint(3, 6))
    while True:
        for sentence in chosen:
            yield " " + sentence


def haystack(rng: random.Random, noise_share: float = 0.25) -> Iterator[str]:
    """Return noise for some samples and prose for the others."""
    return noise(rng) if rng.random() < noise_share else prose(rng)
