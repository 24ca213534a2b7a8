"""InfiniteBench's retrieval tasks: a pass key, a string of digits, a value of a JSON object.

Facts from OpenBMB/InfiniteBench (``data/construct_synthetic_dataset.py``, ``src/prompt.py``, ``src/eval_utils.py``):
five digits, or ten of which five repeat a neighbour; the needle's two sentences between lines of noise; UUID keys and
values; the first words of the answer given to models without a chat format. New tokens are more than InfiniteBench's 6,
12 and 50, which are another tokenizer's. Instructions and noise are our own; the object may end in a cut pair.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from kvsift.texts.sample import Draft, DraftQuestion, Style, Task
from kvsift.texts.words import distinct, uuid
from kvsift_lab.eval.tasks.ruler_niah import noise_lines

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


TASKS = tuple(
    Task(name, about, draft, max_questions=1, family="infinite", style=style)
    for name, about, draft, style in (
        ("infinite_passkey", "a number of five digits, twice in noise", draft_passkey, _NUMBER_STYLE),
        ("infinite_number_string", "ten digits with repetitions, twice in noise", draft_number_string, _NUMBER_STYLE),
        ("infinite_kv_retrieval", "a value of a JSON object of UUIDs that fills the context", draft_kv, _KV_STYLE),
    )
)
