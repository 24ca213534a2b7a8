"""RULER's needle tasks: magic values of keys in noise, prose or other needles, and a chain of variables in noise.

Facts from NVIDIA/RULER (``scripts/synthetic.yaml``, ``scripts/data/synthetic/niah.py``, ``variable_tracking.py``):

* niah: kind of haystack, kinds and counts of keys and values, the needle's sentence, one line per needle where the
  haystack is no prose, four queried keys joined by commas, the answer's first words given, 128 new tokens.
* vt: one chain, four hops, names of five capitals, a line per assignment, noise between them, a short solved example
  before (three capitals), the answer's first words given, all five names as the answer, 30 new tokens.

Instructions, noise, prose and words are our own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from string import ascii_uppercase

from kvsift.texts.layout import Draft, DraftQuestion
from kvsift.texts.prose import NOISE, prose
from kvsift.texts.words import digits, distinct
from kvsift_lab.eval.sample import Style, Task
from kvsift_lab.eval.tasks.words import listed, two_words, uuid

NOISE_BLOCK = " ".join(NOISE[:5])
STYLE = Style("string_match_all", 128, is_framed=False, stop=None)

_MAKERS: dict[str, Callable[[random.Random], str]] = {
    "words": two_words,
    "numbers": lambda rng: digits(rng, 7),
    "uuids": uuid,
}


@dataclass(frozen=True)
class NeedleVariant:
    """A row of RULER's table; ``num_values`` is per key."""

    haystack: str = "essay"
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1


VARIANTS: dict[str, tuple[NeedleVariant, str]] = {
    "niah_single_1": (NeedleVariant("noise"), "one key with a number, in noise"),
    "niah_single_2": (NeedleVariant(), "one key with a number, in prose"),
    "niah_single_3": (NeedleVariant(values="uuids"), "one key with a UUID, in prose"),
    "niah_multikey_1": (NeedleVariant(num_keys=4), "four keys with a number each, one of them queried, in prose"),
    "niah_multikey_2": (NeedleVariant("needle"), "one key among needles that fill the context"),
    "niah_multikey_3": (
        NeedleVariant("needle", "uuids", "uuids"),
        "one UUID key among UUID needles that fill the context",
    ),
    "niah_multivalue": (NeedleVariant(num_values=4), "one key with four numbers, all of them queried, in prose"),
    "niah_multiquery": (
        NeedleVariant(num_keys=4, num_queries=4),
        "four keys with a number each, all of them queried, in prose",
    ),
}


def draft(variant: NeedleVariant, rng: random.Random, num_questions: int) -> Draft:
    keys = distinct(rng, _MAKERS[variant.keys], variant.num_keys)
    owners = [key for key in keys for _ in range(variant.num_values)]
    values = distinct(rng, _MAKERS[variant.values], len(owners))
    order = rng.sample(range(len(owners)), len(owners))
    separator = " " if variant.haystack == "essay" else "\n"
    needles = [separator + needle(variant, owners[i], values[i]) for i in order]
    queried = rng.sample(keys, variant.num_queries)
    indices = [i for key in queried for i, owner in enumerate(owners) if owner == key]
    answers = tuple(values[i] for i in indices)
    one = len(answers) == 1
    what = variant.values[:-1] if one else variant.values
    subject = f"special magic {what} for {listed(queried)} that the text gives"
    question = DraftQuestion(
        f"\nWhat {'is the' if one else 'are all the'} {subject}?",
        ", ".join(answers),
        max(order.index(i) for i in indices),
        answers,
        f" The {subject} {'is' if one else 'are'}",
    )
    is_stock = variant.haystack != "needle"
    return Draft(needles, [question], _haystack(variant, rng, set(keys)), is_stock, _intro(what, one))


def needle(variant: NeedleVariant, key: str, value: str) -> str:
    return f"One of the special magic {variant.values} for {key} is: {value}."


def noise_lines() -> Iterator[str]:
    """Yield the same block of noise, line by line."""
    while True:
        yield "\n" + NOISE_BLOCK


def _haystack(variant: NeedleVariant, rng: random.Random, used: set[str]) -> Iterator[str]:
    if variant.haystack == "noise":
        return noise_lines()
    if variant.haystack == "needle":
        return _other_needles(variant, rng, used)
    return (" " + piece.strip() for piece in prose(rng))


def _other_needles(variant: NeedleVariant, rng: random.Random, used: set[str]) -> Iterator[str]:
    while True:
        key = _MAKERS[variant.keys](rng)
        if key not in used:  # keys of the haystack may recur, the queried one may not
            yield "\n" + needle(variant, key, _MAKERS[variant.values](rng))


def _intro(what: str, one: bool) -> str:
    hidden, them = ("A special magic {} is", "it") if one else ("Special magic {} are", "them")
    return (
        f"{hidden.format(what)} hidden in the text below. Remember {them}: the question at the end asks for {them}.\n"
    )


NUM_HOPS = 4
EXAMPLE_BLOCKS = 4  # of noise in the example, which RULER makes as long as 500 tokens allow
_VT_INTRO = "Keep track of the chains of variable assignments that are hidden in the text below.\n\n"


def draft_vt(rng: random.Random, num_questions: int) -> Draft:
    number, other = distinct(rng, lambda r: digits(r, 5), 2)
    names = _variables(rng, 5)
    needles = ["\n" + line for line in assignments(names, number)]
    question = DraftQuestion(
        _vt_question(number), " ".join(names), len(needles) - 1, tuple(names), _answer_prefix(number)
    )
    return Draft(needles, [question], noise_lines(), is_stock=True, intro=f"{_example(rng, other)}\n\n{_VT_INTRO}")


def assignments(names: Sequence[str], number: str) -> list[str]:
    """Return the lines: the first variable gets the number, each other one the variable before it."""
    return [f"VAR {name} = {source}" for name, source in zip(names, (number, *(f"VAR {name}" for name in names)))]


def _variables(rng: random.Random, num_letters: int) -> list[str]:
    return distinct(rng, lambda r: "".join(r.choices(ascii_uppercase, k=num_letters)), NUM_HOPS + 1)


def _vt_question(number: str) -> str:
    return f"\nQuestion: Which variables of the text above are assigned the value {number}? Find all of them."


def _answer_prefix(number: str) -> str:
    return (
        f" Answer: By the chains of assignments in the text above, {NUM_HOPS + 1} variables are assigned the value "
        f"{number}, namely:"
    )


def _example(rng: random.Random, number: str) -> str:
    names = _variables(rng, 3)
    lines = [NOISE_BLOCK] * EXAMPLE_BLOCKS
    places = sorted(rng.sample(range(EXAMPLE_BLOCKS + NUM_HOPS + 1), NUM_HOPS + 1))
    for place, line in zip(places, assignments(names, number)):
        lines.insert(place, line)
    return _VT_INTRO + "\n".join(lines) + _vt_question(number) + _answer_prefix(number) + " " + " ".join(names)


def _task(name: str, about: str, make: Callable[[random.Random, int], Draft], style: Style = STYLE) -> Task:
    return Task(name, about, make, tokens_per_question=400, max_questions=1, family="ruler", style=style)


TASKS = (
    *(_task(name, about, partial(draft, variant)) for name, (variant, about) in VARIANTS.items()),
    _task("vt", "a chain of five variables in noise, all of them queried", draft_vt, replace(STYLE, max_new_tokens=30)),
)
