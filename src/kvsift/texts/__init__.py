"""Texts that the package makes itself: prose, and contexts with questions, seeded and of an exact number of tokens.

``kvsift demo`` and ``kvsift calibrate`` read them; the laboratory has more tasks of the same kind.
"""

import random
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module

from kvsift.texts.layout import Layout, cut_tail, lay_out
from kvsift.texts.sample import Draft, Encode, Question, Sample, SampleRequest, Style, Task

TASKS: dict[str, Task] = {
    task.name: task for name in ("needle", "key_value", "facts") for task in import_module(f"{__name__}.{name}").TASKS
}


def make_sample(
    task: Task,
    length: int,
    seed: int,
    encode: Encode,
    num_questions: int = 8,
    prefix: Sequence[int] = (),
) -> Sample:
    """Return a context of exactly ``length`` tokens, the same for the same arguments.

    Args:
        task: writes the context, or drafts it for any length.
        length: tokens of the context, the prefix included and the questions excluded.
        encode: token ids of a piece of text without special tokens.
        num_questions: at most this many; short contexts and tasks with ``max_questions`` have fewer.
        prefix: first ids, such as bos.

    Raises:
        ValueError: if the task needs a longer context.
    """
    rng = random.Random(f"{task.name}:{length}:{seed}")
    count = task.num_questions(length, num_questions)
    if task.write is not None:
        return task.write(SampleRequest(rng, length, count, encode, tuple(prefix)))
    assert task.draft is not None, "a task drafts or writes"
    draft = task.draft(rng, count)
    layout = lay_out(draft, length, encode, lru_cache(maxsize=None)(encode), rng, prefix)
    context, ids = cut_tail(layout, length, encode)
    questions = _questions(draft, layout, length, task.style)
    return Sample(task.name, context, tuple(ids), questions, in_turn=task.in_turn)


def _questions(draft: Draft, layout: Layout, length: int, style: Style) -> tuple[Question, ...]:
    starts = layout.needle_starts
    return tuple(
        style.question(q.text, q.answer, starts[q.needle] / length, q.answers, q.answer_prefix) for q in draft.questions
    )
