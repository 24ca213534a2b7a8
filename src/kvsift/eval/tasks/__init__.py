"""Long-context tasks: seeded, of exact token length, generated offline for any tokenizer."""

import random
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib import import_module

from kvsift.errors import unknown
from kvsift.eval.tasks.layout import Layout, cut_tail, lay_out
from kvsift.eval.tasks.sample import Draft, Encode, Question, Sample, SampleRequest, Style, Task, framed

__all__ = [
    "FAMILIES",
    "TASKS",
    "Draft",
    "Encode",
    "Question",
    "Sample",
    "Task",
    "find_task",
    "framed",
    "make_sample",
    "questions_of",
    "task_names",
]

MODULES = (
    *("needle", "multi_value", "key_value", "facts", "variables", "passkey"),
    *("ruler_niah", "ruler_vt", "ruler_words", "ruler_qa"),
    *("infinite_retrieval", "infinite_math", "infinite_code"),
    "dialogue",
    "perplexity",
)
"""Files of this folder with a tuple ``TASKS``, in the order of the tables."""

TASKS: dict[str, Task] = {task.name: task for module in MODULES for task in import_module(f"{__name__}.{module}").TASKS}
FAMILIES: dict[str, tuple[str, ...]] = {
    family: tuple(name for name, task in TASKS.items() if task.family == family)
    for family in dict.fromkeys(task.family for task in TASKS.values())
}
"""Families of tasks; the embedded model is trained on "own"."""


def find_task(name: str) -> Task:
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return TASKS[name]


def task_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return names of tasks, families replaced by their tasks, each once and in the given order."""
    ordered: dict[str, None] = {}
    for name in names:
        if name not in FAMILIES and name not in TASKS:
            raise unknown("task", name, list(dict.fromkeys([*TASKS, *FAMILIES])))
        ordered.update(dict.fromkeys(FAMILIES.get(name, (name,))))
    return tuple(ordered)


def make_sample(
    task: str,
    length: int,
    seed: int,
    encode: Encode,
    num_questions: int = 8,
    prefix: Sequence[int] = (),
) -> Sample:
    """Return a context of exactly ``length`` tokens, the same for the same arguments.

    Args:
        task: a name in ``TASKS``.
        length: tokens of the context, the prefix included and the questions excluded.
        encode: token ids of a piece of text without special tokens.
        num_questions: at most this many; short contexts and tasks with ``max_questions`` have fewer.
        prefix: first ids, such as bos.

    Raises:
        ValueError: if the task needs a longer context.
    """
    maker = find_task(task)
    rng = random.Random(f"{task}:{length}:{seed}")
    count = maker.num_questions(length, num_questions)
    if maker.write is not None:
        return maker.write(SampleRequest(rng, length, count, encode, tuple(prefix)))
    assert maker.draft is not None, "a task drafts or writes"
    draft = maker.draft(rng, count)
    layout = lay_out(draft, length, encode, lru_cache(maxsize=None)(encode), rng, prefix)
    context, ids = cut_tail(layout, length, encode)
    questions = questions_of(draft, layout, length, maker.style)
    return Sample(task, context, tuple(ids), questions, in_turn=maker.in_turn)


def questions_of(draft: Draft, layout: Layout, length: int, style: Style) -> tuple[Question, ...]:
    """Return the questions of a draft with their depths in a layout."""
    starts = layout.needle_starts
    return tuple(
        style.question(q.text, q.answer, starts[q.needle] / length, q.answers, q.answer_prefix) for q in draft.questions
    )
