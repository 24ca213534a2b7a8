"""Passkey task: one number, stated twice in a row, and one question (Landmark Attention's test)."""

import random

from kvsift.texts.layout import Draft, DraftQuestion
from kvsift.texts.prose import haystack
from kvsift.texts.words import digits
from kvsift_lab.eval.sample import Task


def draft(rng: random.Random, num_questions: int) -> Draft:
    passkey = digits(rng, rng.choice((5, 6, 7)))
    needle = f" The pass key is {passkey}. Remember it. {passkey} is the pass key."
    return Draft([needle], [DraftQuestion("What is the pass key?", passkey, 0)], haystack(rng), is_stock=True)


TASKS = (Task("passkey", "one number stated twice", draft, max_questions=1),)
