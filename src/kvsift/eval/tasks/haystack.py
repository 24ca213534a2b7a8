"""Filler around needles: repeated noise sentences or prose."""

import random
from collections.abc import Iterator

from kvsift.eval.text import NOISE, prose


def noise(rng: random.Random) -> Iterator[str]:
    """A few noise sentences that repeat in the same order, a space in front of each."""
    chosen = rng.sample(NOISE, rng.randint(3, 6))
    while True:
        for sentence in chosen:
            yield " " + sentence


def haystack(rng: random.Random, noise_share: float = 0.25) -> Iterator[str]:
    """Noise for some samples, prose for the others."""
    return noise(rng) if rng.random() < noise_share else prose(rng)
