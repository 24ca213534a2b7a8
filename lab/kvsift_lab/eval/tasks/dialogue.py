"""Dialogue task: five turns over one context; the fourth and the fifth return to the topic of the first.

Turn 4 repeats turn 1 in other words, so the conversation has the answer too. Turn 5 is about another value of turn 1's
key, which only the context has: a cache that keeps what turns 1 to 4 needed fails.
"""

from __future__ import annotations

import random

from kvsift.texts.layout import Draft, DraftQuestion
from kvsift.texts.needle import question, sentence, value
from kvsift.texts.prose import haystack
from kvsift.texts.words import distinct
from kvsift_lab.eval.sample import Task
from kvsift_lab.eval.tasks.words import two_words

NUM_TURNS = 5


def draft(rng: random.Random, num_questions: int) -> Draft:
    keys = distinct(rng, two_words, 3)
    kind, other = rng.sample(("number", "word"), 2)
    values = distinct(rng, lambda r: value(r, kind), len(keys))
    hidden = [*zip(keys, [kind] * len(keys), values), (keys[0], other, value(rng, other))]
    order = rng.sample(range(len(hidden)), len(hidden))
    needles = [" " + sentence(*hidden[i]) for i in order]
    texts = [question(key, kind) for key in keys]
    again = f"Back to my first question: which special magic {kind} does the text give for {keys[0]}?"
    turns = [*zip(texts, range(3)), (again, 0), (question(keys[0], other), 3)]
    questions = [DraftQuestion(text, hidden[i][2], order.index(i)) for text, i in turns]
    return Draft(needles, questions, haystack(rng), is_stock=True)


_ABOUT = "five questions in turn; the last two return to the first"
TASKS = (
    Task("dialogue", _ABOUT, draft, tokens_per_question=64, max_questions=NUM_TURNS, family="dialogue", in_turn=True),
)
