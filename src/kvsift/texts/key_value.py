"""Key-value task: JSON-like lines fill the context, so every key has many look-alikes."""

import random
from collections.abc import Callable, Iterator

from kvsift.texts.layout import Draft, DraftQuestion
from kvsift.texts.words import DEFAULT, digits, distinct, hexadecimal, pseudo_word

Maker = Callable[[random.Random], str]
TOKENS_PER_QUESTION = 40  # of its needles, an upper bound


def draft(rng: random.Random, num_questions: int) -> Draft:
    make_key, make_value = rng.choice(_MAKERS), rng.choice(_MAKERS)
    keys = distinct(rng, make_key, num_questions)
    values = [make_value(rng) for _ in keys]
    questions = [
        DraftQuestion(f'What is the value of the key "{k}"?', v, i) for i, (k, v) in enumerate(zip(keys, values))
    ]
    needles = [_line(k, v) for k, v in zip(keys, values)]
    return Draft(needles, questions, _other_lines(rng, make_key, make_value, set(keys)), is_stock=False)


def _line(key: str, value: str) -> str:
    return f'\n"{key}": "{value}",'


def _other_lines(rng: random.Random, make_key: Maker, make_value: Maker, used: set[str]) -> Iterator[str]:
    while True:
        key = make_key(rng)
        if key not in used:
            used.add(key)
            yield _line(key, make_value(rng))


_MAKERS: tuple[Maker, ...] = (
    lambda rng: hexadecimal(rng, 8),
    lambda rng: digits(rng, 6),
    lambda rng: f"{rng.choice(DEFAULT.adjectives)}_{rng.choice(DEFAULT.nouns)}_{digits(rng, 2)}",
    lambda rng: f"{pseudo_word(rng)} {pseudo_word(rng)}",
)
