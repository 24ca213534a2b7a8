"""Words of invented keys, names and values."""

# ruff: noqa: SIM905  (a list of words reads best as a line of words)

import random
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ONSETS = """b bl br c ch cl d dr f fl fr g gl gr h j k kl kr l m n p pl pr qu r s sh sk sl sn sp st t th tr v w
z""".split()
_VOWELS = "a e i o u ai ea ee ia ou oo".split()
_CODAS = ["", "", "", "l", "n", "r", "s", "t", "m", "nd", "rk", "st", "x"]


@dataclass(frozen=True)
class Lexicon:
    """Open word classes of names and values; training may widen them."""

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    first_names: tuple[str, ...]
    surnames: tuple[str, ...]
    places: tuple[str, ...]
    colours: tuple[str, ...]
    jobs: tuple[str, ...]
    foods: tuple[str, ...]
    animals: tuple[str, ...]


def table_of(name: str) -> dict[str, Any]:
    """Return the words or sentences of a TOML file of this folder."""
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


DEFAULT = Lexicon(**{name: tuple(words.split()) for name, words in table_of("words.toml").items()})


def pseudo_word(rng: random.Random) -> str:
    """Return a pronounceable invented word, whose meaning only the context gives."""
    syllables = rng.randint(2, 3)
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables))


def digits(rng: random.Random, count: int) -> str:
    """Return a number of exactly ``count`` digits, without a leading zero."""
    return str(rng.randrange(10 ** (count - 1), 10**count))


def hexadecimal(rng: random.Random, count: int) -> str:
    return f"{rng.getrandbits(4 * count):0{count}x}"


def with_article(phrase: str) -> str:
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def distinct(rng: random.Random, make: Callable[[random.Random], str], count: int) -> list[str]:
    """Return ``count`` different results of ``make(rng)``, in order."""
    results: dict[str, None] = {}
    while len(results) < count:
        results.setdefault(make(rng))
    return list(results)
