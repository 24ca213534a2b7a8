"""Recipes of evaluations: TOML files that hold everything a result depends on."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from kvsift.errors import InputError, unknown
from kvsift.eval.rows import Row, rows_of
from kvsift.eval.task_files import TaskFile, task_file, whole_number
from kvsift.eval.tasks import find_task, task_names
from kvsift.methods.base import Phase
from kvsift.runtime.places import reason_against
from kvsift.runtime.spec import parse_plan

SETUPS: dict[str, Phase] = {"question_decoded": "decode", "whole_prompt": "prefill", "sparse_prefill": "prefill"}
"""How a question reaches the model -> the phase its tokens belong to."""

LISTS = {"tasks": str, "plans": str, "budgets": int, "lengths": int}
LEAST = {"questions_per_task": 1, "questions_per_context": 1, "seed": 0}


class Job(NamedTuple):
    """One context; ``length`` is None for the sample number ``seed`` of a file."""

    task: str
    length: int | None
    seed: int


@dataclass(frozen=True)
class Recipe:
    """Everything a result depends on.

    Attributes:
        tasks: names in ``eval.tasks.TASKS``, or of a family of tasks; none if there are files.
        lengths: tokens of each context; ``length`` in a file for a single one.
        questions_per_task, questions_per_context: how many are asked; contexts are made until there are enough.
        plans: rows of the tables, ``{budget}`` in them is replaced.
        budgets: columns of the tables.
        settings: appended to every plan that has a budget, for instance ":sinks=4:window=16", as far as the plan does
            not say otherwise.
        setup: "question_decoded": the question's tokens are decoded under the plan, after the context; "whole_prompt":
            context and question are prefilled densely, the answer is decoded under the plan; "sparse_prefill": context
            and question are prefilled under the plan.
        framed: put questions of published formats into the package's own, for models that know no other.
        references: add dense, oracle, StreamingLLM and random rows where they are lacking.
        files: tasks from local files.
        model: directory; None is the embedded model.
        device, dtype, placement, seed: as in ``LLM`` and ``make_sample``.
    """

    questions_per_task: int
    questions_per_context: int
    plans: tuple[str, ...]
    budgets: tuple[int, ...]
    tasks: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    settings: str = ""
    setup: str = "question_decoded"
    framed: bool = False
    references: bool = True
    files: tuple[TaskFile, ...] = ()
    model: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    placement: str = "device"
    seed: int = 0

    @classmethod
    def load(cls, path: Path) -> Recipe:
        """A recipe from a TOML file.

        Raises:
            InputError: if it is missing, not TOML, not complete, or has a key or a value that makes no sense.
        """
        try:
            return cls.of(tomllib.loads(path.read_text()), path.name)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
            raise InputError(f"the recipe {path} cannot be read: {error}") from None

    @classmethod
    def of(cls, table: Mapping[str, Any], name: str = "recipe") -> Recipe:
        """A recipe from its keys."""
        known = [f.name for f in fields(cls)]
        for key in table:
            if key not in (*known, "length"):
                raise unknown(f"key of the recipe {name}", key, [*known, "length"])
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in table.items()
        }
        if "length" in values:
            if "lengths" in values:
                raise InputError(f"the recipe {name} has length and lengths; give one of them.")
            values["lengths"] = (values.pop("length"),)
        values["files"] = tuple(task_file(each, name) for each in values.get("files", ()))
        lacking = [f.name for f in fields(cls) if f.default is MISSING and f.name not in values]
        lacking += [] if values["files"] else [key for key in ("tasks", "lengths") if key not in values]
        if lacking:
            raise InputError(f"the recipe {name} is not complete; it lacks {', '.join(lacking)}.")
        return cls(**values)

    def __post_init__(self) -> None:
        for key, kind in LISTS.items():
            if key not in ("tasks", "lengths") or not self.files or getattr(self, key):
                _list_of(key, getattr(self, key), kind)
        for key, least in LEAST.items():
            whole_number(key, getattr(self, key), least)
        for length in self.lengths:
            whole_number("length", length, 1)
        for key in ("settings", "device", "dtype", "placement", *(["model"] if self.model is not None else [])):
            if not isinstance(getattr(self, key), str):
                raise InputError(f"{key}={getattr(self, key)!r} of a recipe must be text.")
        for key in ("framed", "references"):
            if not isinstance(getattr(self, key), bool):
                raise InputError(f"{key}={getattr(self, key)!r} of a recipe must be true or false.")
        if self.setup not in SETUPS:
            raise unknown("setup", str(self.setup), SETUPS)
        object.__setattr__(self, "tasks", task_names(self.tasks))
        if bool(self.tasks) != bool(self.lengths):
            raise InputError("a recipe with tasks needs lengths, and one with lengths needs tasks.")
        for row in self.rows:
            _check_setup(self.setup, row)
            if (reason := reason_against(self.placement, parse_plan(row.plan))) is not None:
                raise InputError(reason)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Every plan at every budget, references included."""
        about: Phase = "prefill" if self.setup == "sparse_prefill" else "decode"
        return rows_of(self.plans, self.budgets, self.settings, self.references, about)

    @property
    def question_phase(self) -> Phase:
        """The phase that the question's tokens belong to."""
        return SETUPS[self.setup]

    @cached_property
    def jobs(self) -> tuple[Job, ...]:
        """Every context that is made: the first of each task and length before the second of any, so that half a run
        is half of every table."""
        counts = {(task, length): self._contexts(task, length) for length in self.lengths for task in self.tasks}
        return tuple(
            Job(task, length, self.seed + index)
            for index in range(max(counts.values(), default=0))
            for (task, length), count in counts.items()
            if index < count
        )

    def _contexts(self, task: str, length: int) -> int:
        found = find_task(task)
        fitting = max(1, length // (2 * found.tokens_per_question))  # as ``make_sample`` counts
        return -(-self.questions_per_task // min(self.questions_per_context, found.max_questions, fitting))


def _check_setup(setup: str, row: Row) -> None:
    plan = parse_plan(row.plan)
    rule = plan.prefill
    prefill = rule is not None and not rule.method.unbounded
    if setup == "whole_prompt" and prefill:
        raise InputError(
            f'the plan {row.plan} selects in prefill, but setup = "whole_prompt" prefills densely. Leave its prefill '
            'rule out, or choose setup = "sparse_prefill".'
        )
    if setup == "sparse_prefill" and row.phase is not None and not prefill:
        raise InputError(
            f'the plan {row.plan} has no rule for prefill, and setup = "sparse_prefill" is about nothing else. Write '
            f'prefill={plan.decode}, or choose setup = "whole_prompt".'
        )


def _list_of(key: str, value: object, kind: type) -> None:
    if isinstance(value, tuple) and value and all(type(each) is kind for each in value):
        return
    raise InputError(f"{key}={value!r} of a recipe must be a list of {'names' if kind is str else 'whole numbers'}.")
