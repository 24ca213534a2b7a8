"""Synthetic long-context tasks: seeded, of exact token length, with several questions per context."""

import random
from collections.abc import Sequence
from difflib import get_close_matches
from functools import lru_cache

from kvsift.eval.tasks import facts, key_value, multi_value, needle, passkey, variables
from kvsift.eval.tasks.layout import Layout, cut_tail, lay_out
from kvsift.eval.tasks.sample import Draft, Encode, Question, Sample, Task

__all__ = ["TASKS", "Draft", "Encode", "Question", "Sample", "Task", "find_task", "make_sample", "questions_of"]

TASKS: dict[str, Task] = {
    module.TASK.name: module.TASK for module in (needle, multi_value, key_value, facts, variables, passkey)
}


def find_task(name: str) -> Task:
    if name not in TASKS:
        guess = get_close_matches(name, TASKS, n=1)
        hint = f"; did you mean {guess[0]!r}?" if guess else "."
        raise ValueError(f"unknown task {name!r}{hint} Known: {', '.join(sorted(TASKS))}")
    return TASKS[name]


def make_sample(
    task: str,
    length: int,
    seed: int,
    encode: Encode,
    num_questions: int = 8,
    prefix: Sequence[int] = (),
) -> Sample:
    """A context of exactly ``length`` tokens, the same for the same arguments.

    Args:
        task: a name in ``TASKS``.
        length: tokens of the context, prefix included; questions come on top.
        encode: token ids of a piece of text without special tokens.
        num_questions: at most this many; short contexts and the passkey task have fewer.
        prefix: ids to start with, such as bos.
    """
    found = find_task(task)
    rng = random.Random(f"{task}:{length}:{seed}")
    count = max(1, min(num_questions, found.max_questions, length // (2 * found.tokens_per_question)))
    draft = found.draft(rng, count)
    layout = lay_out(draft, length, encode, lru_cache(maxsize=None)(encode), rng, prefix)
    context, ids = cut_tail(layout, length, encode)
    return Sample(task, context, tuple(ids), questions_of(draft, layout, length))


def questions_of(draft: Draft, layout: Layout, length: int) -> tuple[Question, ...]:
    """The questions of a draft with the depths that its layout gave them."""
    return tuple(Question(ask.text, ask.answer, layout.needle_starts[ask.needle] / length) for ask in draft.asks)
