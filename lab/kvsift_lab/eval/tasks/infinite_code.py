"""InfiniteBench's code_debug on generated Python: which of four functions has an error?

Facts from OpenBMB/InfiniteBench (``src/prompt.py``, ``src/eval_utils.py``): exactly one function has an obvious error;
four options A to D are functions of the code; the letter or the function's name is the answer. There the code is
that of real packages; here it is small functions on lists of numbers, of which all but one run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from kvsift.texts.sample import Draft, DraftQuestion, Style, Task
from kvsift.texts.words import ADJECTIVES, NOUNS, endless

LETTERS = "ABCD"
_STYLE = Style("code_debug", 12, is_framed=False, stop=None)
_VERBS = ("count", "collect", "measure", "combine", "weigh", "filter", "scale", "merge", "rank", "trace", "fold", "sum")
# Bodies of a function of ``items``, a list of whole numbers; {n} is a number from 2 to 9.
_BODIES = (
    "    total = {n}\n    for item in items:\n        total += item * {n}\n    return total",
    "    chosen = [item for item in items if item % {n}]\n    return sorted(chosen)",
    "    seen = {{}}\n    for place, item in enumerate(items):\n        seen[item] = place + {n}\n    return seen",
    "    result = list(items)\n    result.extend(range({n}))\n    return result[::-1]",
    "    largest = max(items, default={n})\n    return [item / (abs(largest) + {n}) for item in items]",
    '    words = [str(item) for item in items]\n    return ", ".join(words) + "!" * {n}',
    "    pairs = list(zip(items, items[1:]))\n    return [first - {n} * second for first, second in pairs]",
    "    count = len(items)\n    if count > {n}:\n        return items[:{n}]\n    return items + [count]",
)
# Each fails for every list.
_ERRORS = (
    "    total = {n}\n    for item in items:\n        total += item * {n}\n    return totl",
    "    count = len(items, {n})\n    return [count, *items]",
    '    count = len(items) + "{n}"\n    return [count, *items]',
    "    result = list(items)\n    result.push({n})\n    return result",
    "    result = tuple(items) + ({n},)\n    result[0] = {n}\n    return result",
    "    count = len(items)\n    return count({n})",
)


def draft(rng: random.Random, num_questions: int) -> Draft:
    names = endless(rng, _name)
    options = [next(names) for _ in LETTERS]
    wrong = rng.randrange(len(options))
    codes = [_function(rng, name, _ERRORS if i == wrong else _BODIES) for i, name in enumerate(options)]
    order = rng.sample(range(len(options)), len(options))
    lettered = "\n".join(f"{letter}. {name}" for letter, name in zip(LETTERS, options))
    question = DraftQuestion(
        f"\n\nOptions:\n{lettered}\n\n",
        f"{LETTERS[wrong]}. {options[wrong]}",
        order.index(wrong),
        (options[wrong], LETTERS[wrong]),
        "The correct option is:",
    )
    intro = "In this Python code exactly one function has an error that stops it whenever it is called. Find it.\n\n"
    return Draft([codes[i] for i in order], [question], _others(rng, names), is_stock=False, intro=intro)


def _function(rng: random.Random, name: str, bodies: tuple[str, ...]) -> str:
    return f"\n\ndef {name}(items):\n{rng.choice(bodies).format(n=rng.randint(2, 9))}\n"


def _others(rng: random.Random, names: Iterator[str]) -> Iterator[str]:
    while True:
        yield _function(rng, next(names), _BODIES)


def _name(rng: random.Random) -> str:
    return f"{rng.choice(_VERBS)}_{rng.choice(ADJECTIVES)}_{rng.choice(NOUNS)}"


_ABOUT = "which of four functions of long Python code has an error"
TASKS = (Task("infinite_code_debug", _ABOUT, draft, max_questions=1, family="infinite", style=_STYLE),)
