"""Long-context tasks: seeded, of exact token length, generated offline for any tokenizer."""

import random
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib import import_module

from kvsift.errors import unknown
from kvsift.texts.layout import Draft, Encode, cut_tail, lay_out
from kvsift_lab.eval.sample import Question, Sample, SampleRequest, Task, framed

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
    "task_names",
]

MODULES = (
    *(f"{__name__}.{name}" for name in ("own", "variables", "passkey", "ruler_needles", "ruler_words", "ruler_qa")),
    *(f"{__name__}.{name}" for name in ("infinite", "dialogue", "perplexity")),
)
"""Modules with a tuple ``TASKS``, in the order of the tables."""

TASKS: dict[str, Task] = {task.name: task for module in MODULES for task in import_module(module).TASKS}
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
    task: str, length: int, seed: int, encode: Encode, num_questions: int = 8, prefix: Sequence[int] = ()
) -> Sample:
    """Return a context of exactly ``length`` tokens, the same for the same arguments.

    Args:
        task: name of the task, which writes the context, or drafts it for any length.
        length: tokens of the context, the prefix included and the questions excluded.
        seed: of the contents.
        encode: token ids of a piece of text without special tokens.
        num_questions: at most this many; short contexts and tasks with ``max_questions`` have fewer.
        prefix: first ids, such as bos.

    Raises:
        ValueError: if the task needs a longer context.
    """
    found = find_task(task)
    rng = random.Random(f"{task}:{length}:{seed}")
    count = found.num_questions(length, num_questions)
    if found.write is not None:
        return found.write(SampleRequest(rng, length, count, encode, tuple(prefix)))
    assert found.draft is not None, "a task drafts or writes"
    draft = found.draft(rng, count)
    layout = lay_out(draft, length, encode, lru_cache(maxsize=None)(encode), rng, prefix)
    context, ids = cut_tail(layout, length, encode)
    questions = tuple(
        found.style.question(q.text, q.answer, layout.needle_starts[q.needle] / length, q.answers, q.answer_prefix)
        for q in draft.questions
    )
    return Sample(task, context, tuple(ids), questions, in_turn=found.in_turn)
