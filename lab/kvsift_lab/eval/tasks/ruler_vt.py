"""RULER's variable tracking: one chain of five variables in noise; which variables have the number?

Facts from NVIDIA/RULER (``scripts/data/synthetic/variable_tracking.py``): one chain, four hops, names of five capitals,
a line per assignment, noise between them, a short solved example before (three capitals), the answer's first words
given, all five names as the answer, 30 new tokens. Instructions and noise are our own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from string import ascii_uppercase

from kvsift.texts.sample import Draft, DraftQuestion, Task
from kvsift.texts.words import digits, distinct
from kvsift_lab.eval.tasks.ruler_niah import NOISE_BLOCK, STYLE, noise_lines

NUM_HOPS = 4
EXAMPLE_BLOCKS = 4  # of noise in the example, which RULER makes as long as 500 tokens allow
_INTRO = "Keep track of the chains of variable assignments that are hidden in the text below.\n\n"


def draft(rng: random.Random, num_questions: int) -> Draft:
    number, other = distinct(rng, lambda r: digits(r, 5), 2)
    names = _names(rng, 5)
    needles = ["\n" + line for line in assignments(names, number)]
    question = DraftQuestion(_question(number), " ".join(names), len(needles) - 1, tuple(names), _answer_prefix(number))
    return Draft(needles, [question], noise_lines(), is_stock=True, intro=f"{_example(rng, other)}\n\n{_INTRO}")


def assignments(names: Sequence[str], number: str) -> list[str]:
    """Return the lines: the first variable gets the number, each other one the variable before it."""
    return [f"VAR {name} = {source}" for name, source in zip(names, (number, *(f"VAR {name}" for name in names)))]


def _names(rng: random.Random, num_letters: int) -> list[str]:
    return distinct(rng, lambda r: "".join(r.choices(ascii_uppercase, k=num_letters)), NUM_HOPS + 1)


def _question(number: str) -> str:
    return f"\nQuestion: Which variables of the text above are assigned the value {number}? Find all of them."


def _answer_prefix(number: str) -> str:
    return (
        f" Answer: By the chains of assignments in the text above, {NUM_HOPS + 1} variables are assigned the value "
        f"{number}, namely:"
    )


def _example(rng: random.Random, number: str) -> str:
    names = _names(rng, 3)
    lines = [NOISE_BLOCK] * EXAMPLE_BLOCKS
    places = sorted(rng.sample(range(EXAMPLE_BLOCKS + NUM_HOPS + 1), NUM_HOPS + 1))
    for place, line in zip(places, assignments(names, number)):
        lines.insert(place, line)
    return _INTRO + "\n".join(lines) + _question(number) + _answer_prefix(number) + " " + " ".join(names)


_ABOUT = "a chain of five variables in noise, all of them queried"
_STYLE = replace(STYLE, max_new_tokens=30)
TASKS = (Task("vt", _ABOUT, draft, tokens_per_question=400, max_questions=1, family="ruler", style=_STYLE),)
