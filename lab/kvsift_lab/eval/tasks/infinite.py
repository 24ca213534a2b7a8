"""InfiniteBench's tasks on generated contexts: retrieval, a number of a long list, an error in code.

Facts from OpenBMB/InfiniteBench (``data/construct_synthetic_dataset.py``, ``src/prompt.py``, ``src/eval_utils.py``):

* passkey, number_string, kv_retrieval: five digits, or ten of which five repeat a neighbour; the needle's two sentences
  between lines of noise; UUID keys and values; the first words of the answer given to models without a chat format. New
  tokens are more than InfiniteBench's 6, 12 and 50, which are another tokenizer's. The object may end in a cut pair.
* math_find: seven questions, numbers from 0 to 99, one end of which is drawn per list so that the answer cannot be
  guessed; second and third are of distinct values; the median of an even count is the mean of the middle two. The
  answer, which takes the whole list (depth 1), is that of the list as it stands after it was cut to length.
* code_debug: exactly one function has an obvious error; four options A to D are functions of the code; the letter or
  the function's name is the answer. There the code is that of real packages; here it is small functions on lists of
  numbers, of which all but one run.

Instructions and noise are our own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from kvsift.texts.layout import Draft, DraftQuestion
from kvsift.texts.words import DEFAULT, distinct
from kvsift_lab.eval.sample import Sample, SampleRequest, Style, Task
from kvsift_lab.eval.tasks.assembly import ITEMS_AT_ONCE, Assembly
from kvsift_lab.eval.tasks.ruler_needles import noise_lines
from kvsift_lab.eval.tasks.words import endless, uuid

_NUMBER_STYLE = Style("first_number", 24, is_framed=False, stop=None)
_KV_STYLE = Style("word_match", 64, is_framed=False, stop=None)
_HIDDEN = (
    "One important piece of information is hidden in a lot of text that says nothing. Find it: you will be asked.\n\n"
)


def draft_passkey(rng: random.Random, num_questions: int) -> Draft:
    return _number("pass key", "".join(rng.choices("0123456789", k=5)))


def draft_number_string(rng: random.Random, num_questions: int) -> Draft:
    return _number("sequence of digits", repetitive(rng))


def repetitive(rng: random.Random) -> str:
    """Return ten digits: five at random, then five times one of them once more beside itself."""
    digits = rng.choices("0123456789", k=5)
    for _ in range(5):
        place = rng.randrange(len(digits))
        digits.insert(place, digits[place])
    return "".join(digits)


def draft_kv(rng: random.Random, num_questions: int) -> Draft:
    key, value = distinct(rng, uuid, 2)
    question = DraftQuestion(f'\n\nKey: "{key}"\nThe value that belongs to this key is:', value, 0)
    intro = "Find the value that belongs to a key of this JSON object.\n\nJSON data:\n{"
    return Draft([_pair(key, value)], [question], _pairs(rng, key), is_stock=False, intro=intro)


def _number(name: str, digits: str) -> Draft:
    needle = f"\nThe {name} is {digits}. Remember it. {digits} is the {name}."
    question = DraftQuestion(f"\n\nWhat is the {name}?\n\n", digits, 0, answer_prefix=f"The {name} is")
    return Draft([needle], [question], noise_lines(), is_stock=True, intro=_HIDDEN)


def _pair(key: str, value: str) -> str:
    return f' "{key}": "{value}",'


def _pairs(rng: random.Random, other: str) -> Iterator[str]:
    while True:
        if (key := uuid(rng)) != other:
            yield _pair(key, uuid(rng))


TOP = 99
_MATH_STYLE = Style("math_find", 12, is_framed=False, stop=None)


def _ranked(index: int) -> Callable[[Sequence[int]], int]:
    """Return a function that finds the distinct number of a rank: 0 is the smallest, -1 the largest."""
    return lambda numbers: sorted(set(numbers))[index]


FINDERS: dict[str, Callable[[Sequence[int]], float]] = {
    "largest": _ranked(-1),
    "second largest": _ranked(-2),
    "third largest": _ranked(-3),
    "smallest": _ranked(0),
    "second smallest": _ranked(1),
    "third smallest": _ranked(2),
    "median": median,
}


def write_math(request: SampleRequest) -> Sample:
    rng = request.rng
    rank = rng.choice(list(FINDERS))
    assembly = Assembly(request, f"What is the {rank} number of this list?\n\n")
    low, high = _range(rng, rank)
    separator = ""
    while assembly.room > 0:
        assembly.add(separator + ", ".join(str(rng.randint(low, high)) for _ in range(ITEMS_AT_ONCE)))
        separator = ", "
    context, ids = assembly.cut()
    answer = FINDERS[rank](numbers_of(context))
    text = str(int(answer) if answer == int(answer) else answer)
    tail = "\n\nAnswer with one number and no other words."
    question = _MATH_STYLE.question(tail, text, 1.0, (text,), f" The {rank} number of the list is:")
    return Sample("infinite_math_find", context, ids, (question,))


def numbers_of(context: str) -> list[int]:
    """Return the numbers of the list; the last one may be cut."""
    return [int(number) for number in re.findall(r"\d+", context.partition("?\n\n")[2])]


def _range(rng: random.Random, rank: str) -> tuple[int, int]:
    low, high = rng.randint(0, TOP // 5), rng.randint(TOP * 4 // 5, TOP)
    if rank == "median":
        return (low, TOP) if rng.random() < 0.5 else (0, high)
    return (0, high) if "largest" in rank else (low, TOP)


LETTERS = "ABCD"
_CODE_STYLE = Style("code_debug", 12, is_framed=False, stop=None)
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


def draft_code(rng: random.Random, num_questions: int) -> Draft:
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
    return f"{rng.choice(_VERBS)}_{rng.choice(DEFAULT.adjectives)}_{rng.choice(DEFAULT.nouns)}"


def _task(name: str, about: str, style: Style, **make: Any) -> Task:
    return Task(f"infinite_{name}", about, max_questions=1, family="infinite", style=style, **make)


TASKS = (
    _task("passkey", "a number of five digits, twice in noise", _NUMBER_STYLE, draft=draft_passkey),
    _task("number_string", "ten digits with repetitions, twice in noise", _NUMBER_STYLE, draft=draft_number_string),
    _task("kv_retrieval", "a value of a JSON object of UUIDs that fills the context", _KV_STYLE, draft=draft_kv),
    _task("math_find", "the largest, a small or the median number of a long list", _MATH_STYLE, write=write_math),
    _task("code_debug", "which of four functions of long Python code has an error", _CODE_STYLE, draft=draft_code),
)
