"""Passkey: one number, stated twice in a row, and one question (Landmark Attention's test)."""

import random

from kvsift.eval.tasks.haystack import haystack
from kvsift.eval.tasks.sample import Ask, Draft, Task
from kvsift.eval.tasks.words import digits


def draft(rng: random.Random, num_questions: int) -> Draft:
    passkey = digits(rng, rng.choice((5, 6, 7)))
    needle = f" The pass key is {passkey}. Remember it. {passkey} is the pass key."
    return Draft([needle], [Ask("What is the pass key?", passkey, 0)], haystack(rng), is_stock=True)


TASK = Task(
    "passkey", "one number stated twice; one question per context", draft, tokens_per_question=48, max_questions=1
)
