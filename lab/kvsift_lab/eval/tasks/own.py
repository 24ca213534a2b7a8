"""Tasks whose contexts the package makes itself, and several needles that share a key, of which the answer is all
values in order of appearance."""

import random

from kvsift.texts import facts, key_value, needle
from kvsift.texts.layout import Draft, DraftQuestion
from kvsift.texts.needle import KINDS, key, sentence, value
from kvsift.texts.prose import haystack
from kvsift.texts.words import distinct
from kvsift_lab.eval.sample import Task


def draft(rng: random.Random, num_questions: int) -> Draft:
    kind = rng.choice(KINDS)
    owners = [k for k in distinct(rng, key, num_questions) for _ in range(rng.randint(2, 4))]
    rng.shuffle(owners)
    values = distinct(rng, lambda r: value(r, kind), len(owners))
    needles = [f" {sentence(k, kind, v)}" for k, v in zip(owners, values)]
    questions = [_question(k, kind, owners, values) for k in dict.fromkeys(owners)]
    return Draft(needles, questions, haystack(rng), is_stock=True)


def _question(key: str, kind: str, owners: list[str], values: list[str]) -> DraftQuestion:
    indices = [i for i, owner in enumerate(owners) if owner == key]
    text = f"What are all the special magic {kind}s for {key} mentioned in the text?"
    return DraftQuestion(text, ", ".join(values[i] for i in indices), indices[-1])


TASKS = (
    Task("needle", "one magic value per key, hidden in noise or prose", needle.draft, needle.TOKENS_PER_QUESTION),
    Task("multi_value", "2 to 4 magic values per key, all in order", draft, tokens_per_question=192),
    Task(
        "key_value", "values of JSON-like lines that fill the context", key_value.draft, key_value.TOKENS_PER_QUESTION
    ),
    Task("facts", "invented facts with natural questions", facts.draft, facts.TOKENS_PER_QUESTION),
)
