"""Long-context tasks: seeded, of exact token length, generated offline for any tokenizer."""

from collections.abc import Iterable, Sequence
from importlib import import_module

from kvsift import texts
from kvsift.errors import unknown
from kvsift.texts.sample import Draft, Encode, Question, Sample, Task, framed

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
    *("kvsift.texts.needle", f"{__name__}.multi_value", "kvsift.texts.key_value", "kvsift.texts.facts"),
    *(f"{__name__}.{name}" for name in ("variables", "passkey", "ruler_needles", "ruler_words", "ruler_qa")),
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
    """Return a context of the task of this name, as ``kvsift.texts.make_sample`` does."""
    return texts.make_sample(find_task(task), length, seed, encode, num_questions, prefix)
