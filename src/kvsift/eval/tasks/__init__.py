"""Long-context tasks: seeded, of exact token length, made offline for any tokenizer. ``TASKS`` lists them."""

import random
from collections.abc import Iterable, Sequence
from functools import lru_cache

from kvsift.errors import unknown
from kvsift.eval.tasks import (
    dialogue,
    facts,
    infinite_code,
    infinite_math,
    infinite_retrieval,
    key_value,
    multi_value,
    needle,
    passkey,
    perplexity,
    ruler_niah,
    ruler_qa,
    ruler_vt,
    ruler_words,
    variables,
)
from kvsift.eval.tasks.framing import framed
from kvsift.eval.tasks.layout import Layout, cut_tail, lay_out
from kvsift.eval.tasks.sample import Draft, Encode, Question, Request, Sample, Style, Task

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

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        *(module.TASK for module in (needle, multi_value, key_value, facts, variables, passkey)),
        *(task for module in (ruler_niah, ruler_vt, ruler_words, ruler_qa) for task in module.TASKS),
        *(task for module in (infinite_retrieval, infinite_math, infinite_code) for task in module.TASKS),
        *dialogue.TASKS,
        *perplexity.TASKS,
    )
}
FAMILIES: dict[str, tuple[str, ...]] = {
    family: tuple(name for name, task in TASKS.items() if task.family == family)
    for family in dict.fromkeys(task.family for task in TASKS.values())
}
"""Names that stand for several tasks; "own" are those the embedded model is trained on."""


def find_task(name: str) -> Task:
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return TASKS[name]


def task_names(names: Iterable[str]) -> tuple[str, ...]:
    """Names of tasks, those of families spelled out, each once and in the order given."""
    found: dict[str, None] = {}
    for name in names:
        if name not in FAMILIES and name not in TASKS:
            raise unknown("task", name, list(dict.fromkeys([*TASKS, *FAMILIES])))
        found.update(dict.fromkeys(FAMILIES.get(name, (name,))))
    return tuple(found)


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
        num_questions: at most this many; short contexts and tasks with ``max_questions`` have fewer.
        prefix: ids to start with, such as bos.

    Raises:
        ValueError: if the task needs a longer context.
    """
    found = find_task(task)
    rng = random.Random(f"{task}:{length}:{seed}")
    count = max(1, min(num_questions, found.max_questions, length // (2 * found.tokens_per_question)))
    if found.write is not None:
        return found.write(Request(rng, length, count, encode, tuple(prefix)))
    assert found.draft is not None, "a task drafts or writes"
    draft = found.draft(rng, count)
    layout = lay_out(draft, length, encode, lru_cache(maxsize=None)(encode), rng, prefix)
    context, ids = cut_tail(layout, length, encode)
    questions = questions_of(draft, layout, length, found.style)
    return Sample(task, context, tuple(ids), questions, in_turn=found.in_turn)


def questions_of(draft: Draft, layout: Layout, length: int, style: Style) -> tuple[Question, ...]:
    """The questions of a draft with the depths that its layout gave them."""
    starts = layout.needle_starts
    return tuple(
        style.question(ask.text, ask.answer, starts[ask.needle] / length, ask.answers, ask.answer_prefix)
        for ask in draft.asks
    )
