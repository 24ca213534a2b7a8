"""Recipes of quality tables: TOML files that hold everything a table depends on."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from kvsift.errors import InputError, unknown
from kvsift.eval.tasks import TASKS, find_task
from kvsift.methods.base import Phase
from kvsift.runtime.plan import PHASES
from kvsift.runtime.spec import parse_plan

LISTS = {"tasks": str, "plans": str, "budgets": int}
LEAST = {"length": 1, "questions_per_task": 1, "questions_per_context": 1, "seed": 0}


@dataclass(frozen=True)
class Recipe:
    """Everything a quality table depends on.

    Attributes:
        tasks: names in ``eval.tasks.TASKS``.
        length: tokens of each context.
        questions_per_task, questions_per_context: how many are asked; contexts are made until there are enough.
        plans: rows of the table, ``{budget}`` in them is replaced.
        budgets: columns of the table.
        settings: appended to every plan that has a budget, for instance ":sinks=4:window=16".
        question_phase: "decode" or "prefill".
        model: directory; None is the embedded model.
        device, dtype, seed: as in ``LLM`` and ``make_sample``.
    """

    tasks: tuple[str, ...]
    length: int
    questions_per_task: int
    questions_per_context: int
    plans: tuple[str, ...]
    budgets: tuple[int, ...]
    settings: str = ""
    question_phase: Phase = "decode"
    model: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0

    @classmethod
    def load(cls, path: Path) -> Recipe:
        """A recipe from a TOML file.

        Raises:
            InputError: if it is missing, not TOML, not complete, or has a key or a value that makes no sense.
        """
        try:
            table = tomllib.loads(path.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InputError(f"the recipe {path} cannot be read: {error}") from None
        known = [f.name for f in fields(cls)]
        for key in table:
            if key not in known:
                raise unknown(f"key of the recipe {path.name}", key, known)
        lacking = [f.name for f in fields(cls) if f.default is MISSING and f.name not in table]
        if lacking:
            raise InputError(f"the recipe {path.name} is not complete; it lacks {', '.join(lacking)}.")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
        return cls(**values)

    def __post_init__(self) -> None:
        for key, kind in LISTS.items():
            _list_of(key, getattr(self, key), kind)
        for key, least in LEAST.items():
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{key}={value!r} of a recipe must be a whole number, {least} or more.")
        for key in ("settings", "device", "dtype", *(["model"] if self.model is not None else [])):
            if not isinstance(getattr(self, key), str):
                raise InputError(f"{key}={getattr(self, key)!r} of a recipe must be text.")
        for task in self.tasks:
            if task not in TASKS:
                raise unknown("task", task, TASKS)
        if self.question_phase not in PHASES:
            raise unknown("question_phase", str(self.question_phase), PHASES)
        for spec, _ in self.rows():
            parse_plan(spec)

    def rows(self) -> Iterator[tuple[str, int | None]]:
        """(plan, budget) of every cell; a plan without a budget has one cell."""
        for plan in self.plans:
            if "{budget}" not in plan:
                yield plan, None
                continue
            for budget in self.budgets:
                yield plan.replace("{budget}", str(budget)) + self.settings, budget

    def jobs(self) -> list[tuple[str, int]]:
        """(task, seed) of every context that will be prefilled."""
        jobs = []
        for task in self.tasks:
            found = find_task(task)
            fitting = max(1, self.length // (2 * found.tokens_per_question))  # as ``make_sample`` counts
            per_context = min(self.questions_per_context, found.max_questions, fitting)
            contexts = -(-self.questions_per_task // per_context)
            jobs += [(task, self.seed + index) for index in range(contexts)]
        return jobs


def _list_of(key: str, value: object, kind: type) -> None:
    if isinstance(value, tuple) and value and all(type(each) is kind for each in value):
        return
    raise InputError(f"{key}={value!r} of a recipe must be a list of {'names' if kind is str else 'whole numbers'}.")
