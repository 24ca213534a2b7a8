"""Needle task: one sentence per key holds its value (RULER's wording: numbers, hexadecimal codes or words)."""

import random

from kvsift.texts.layout import Draft, DraftQuestion
from kvsift.texts.prose import haystack
from kvsift.texts.words import DEFAULT, digits, distinct, hexadecimal, pseudo_word

KINDS = ("number", "code", "word")
TOKENS_PER_QUESTION = 48  # of its needles, an upper bound


def draft(rng: random.Random, num_questions: int) -> Draft:
    kind = rng.choice(KINDS)
    keys = distinct(rng, key, num_questions)
    values = distinct(rng, lambda r: value(r, kind), num_questions)
    needles = [f" {sentence(k, kind, v)}" for k, v in zip(keys, values)]
    questions = [DraftQuestion(question(k, kind), v, i) for i, (k, v) in enumerate(zip(keys, values))]
    return Draft(needles, questions, haystack(rng), is_stock=True)


def sentence(key: str, kind: str, value: str) -> str:
    return f"One of the special magic {kind}s for {key} is: {value}."


def question(key: str, kind: str) -> str:
    return f"What is the special magic {kind} for {key} mentioned in the text?"


def key(rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.6:
        return f"{rng.choice(DEFAULT.adjectives)}-{rng.choice(DEFAULT.nouns)}"
    return pseudo_word(rng) if draw < 0.85 else hexadecimal(rng, 8)


def value(rng: random.Random, kind: str) -> str:
    if kind == "number":
        return digits(rng, 7)
    if kind == "code":
        return hexadecimal(rng, rng.choice((8, 12, 16)))
    return f"{rng.choice(DEFAULT.adjectives)}-{rng.choice(DEFAULT.nouns)}" if rng.random() < 0.7 else pseudo_word(rng)
