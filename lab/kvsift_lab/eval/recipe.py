"""Recipes of evaluations: TOML files that hold everything a result depends on."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError
from pydantic.dataclasses import dataclass

from kvsift.errors import (
    Conflict,
    InputError,
    InvalidValue,
    MissingFile,
    MissingInput,
    UnreadableFile,
    UnsupportedPlan,
    unknown,
)
from kvsift.methods.base import Phase
from kvsift.plan.capabilities import check_placement
from kvsift.plan.syntax import parse_plan
from kvsift_lab.eval.loaders import LOADERS
from kvsift_lab.eval.plan_rows import PlanRow, budgets_of, plan_rows
from kvsift_lab.eval.tasks import find_task, task_names
from kvsift_lab.eval.tasks.perplexity import NUM_TARGETS

SETUPS: dict[str, Phase] = {"question_decoded": "decode", "whole_prompt": "prefill", "sparse_prefill": "prefill"}
"""Set-up of a question -> the phase of its tokens."""

TEXTS = "pg19", "texts"  # kinds of files without questions

Count = Annotated[StrictInt, Field(ge=1)]
Result = dict[str, Any]
"""One sample: question, plan, answer, score and counters."""

Done = frozenset[tuple[str, int]]
"""(plan, question) of the finished samples of a context."""


class Job(NamedTuple):
    """One context; ``length`` is None for the sample number ``seed`` of a file."""

    task: str
    length: int | None
    seed: int

    @classmethod
    def of(cls, sample: Result) -> Job:
        """Return the job of a sample."""
        return cls(sample["task"], sample["length"], sample["seed"])


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class TaskFile:
    """A task from a local file in its published format.

    Attributes:
        kind: the format, a name in ``eval.loaders.LOADERS``.
        path: of a file or a directory of files.
        limit: the most samples to use.
        name: of the task in results; by default that of the file.
        max_tokens: longer contexts lose their middle; None: no limit.
        targets: tokens that are predicted after each text, for the kinds without questions.
    """

    kind: StrictStr
    path: StrictStr
    limit: Count = 100
    name: StrictStr = ""
    max_tokens: Count | None = None
    targets: Count = NUM_TARGETS

    def __post_init__(self) -> None:
        if self.kind not in LOADERS:
            raise unknown("kind of file", self.kind, LOADERS)
        if self.targets != NUM_TARGETS and self.kind not in TEXTS:
            raise Conflict(
                f"targets are predicted after texts ({', '.join(TEXTS)}), and kind={self.kind!r} has questions. Leave "
                "them out."
            )
        if not Path(self.path).exists():
            raise MissingFile(f"the recipe names the file {self.path}, which does not exist.")
        object.__setattr__(self, "name", self.name or Path(self.path).stem)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class EvalRecipe:
    """Recipe of an evaluation.

    Attributes:
        tasks: names in ``eval.tasks.TASKS`` or of families; may be empty if there are files.
        lengths: tokens of each context; ``length`` in a file for a single one.
        questions_per_task, questions_per_context: numbers of questions; they give the number of contexts.
        plans: rows of the tables; ``{budget}`` is replaced.
        budgets: columns of the tables; without them, those that the plans have.
        settings: appended to every plan with a budget, such as ":sinks=4:window=16", unless the plan has the key.
        setup: "question_decoded": the question's tokens are decoded under the plan, after the context; "whole_prompt":
            context and question are prefilled densely, the answer is decoded under the plan; "sparse_prefill": context
            and question are prefilled under the plan.
        framed: rewrite questions of published formats in the package's own, for models trained on no other.
        references: add the rows of dense, oracle, StreamingLLM and random that are missing.
        files: tasks from local files.
        model: directory; None is the embedded model.
        device, dtype, placement, seed: as in ``LLM`` and ``make_sample``.
    """

    questions_per_task: Count
    questions_per_context: Count
    plans: Annotated[tuple[StrictStr, ...], Field(min_length=1)]
    budgets: tuple[StrictInt, ...] = ()
    tasks: tuple[StrictStr, ...] = ()
    lengths: tuple[Count, ...] = ()
    settings: StrictStr = ""
    setup: StrictStr = "question_decoded"
    framed: StrictBool = False
    references: StrictBool = True
    files: tuple[TaskFile, ...] = ()
    model: StrictStr | None = None
    device: StrictStr = "auto"
    dtype: StrictStr = "auto"
    placement: StrictStr = "device"
    seed: Annotated[StrictInt, Field(ge=0)] = 0

    @classmethod
    def load(cls, path: Path) -> EvalRecipe:
        """Load a TOML file.

        Raises:
            InputError: if it is missing, not TOML, incomplete, or has an unknown key or a wrong value.
        """
        try:
            return cls.from_table(tomllib.loads(path.read_text()), path.name)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
            raise UnreadableFile(f"the recipe {path} cannot be read: {error}") from None

    @classmethod
    def from_table(cls, table: Mapping[str, Any], name: str = "recipe") -> EvalRecipe:
        """Return a recipe from its keys.

        Raises:
            InputError: if they are incomplete, or one is unknown or has a wrong value.
        """
        values = dict(table)
        if "length" in values:
            if "lengths" in values:
                raise Conflict(f"the recipe {name} has length and lengths; give one of them.")
            values["lengths"] = (values.pop("length"),)
        if values.get("files") and not values.get("tasks"):  # files have questions of their own
            values = {"questions_per_task": 1, "questions_per_context": 1, **values}
        try:
            return cls(**values)
        except ValidationError as error:
            raise _refusal(error, name) from None

    def __post_init__(self) -> None:
        if self.setup not in SETUPS:
            raise unknown("setup", str(self.setup), SETUPS)
        object.__setattr__(self, "tasks", task_names(self.tasks))
        if bool(self.tasks) != bool(self.lengths) or not (self.tasks or self.files):
            raise MissingInput("a recipe needs tasks and lengths, or files, or both.")
        names = [file.name for file in self.files]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InvalidValue(f"two files of the recipe are named {twice!r}. Give one of them another: name = '...'")
        for row in self.rows:
            _check_setup(self.setup, row)
            check_placement(parse_plan(row.plan), self.placement)

    @cached_property
    def rows(self) -> tuple[PlanRow, ...]:
        """Rows of the tables: every plan at every budget, references included."""
        about: Phase = "prefill" if self.setup == "sparse_prefill" else "decode"
        return plan_rows(self.plans, self.budgets, self.settings, self.references, about)

    @property
    def columns(self) -> tuple[int, ...]:
        """Budgets of the columns of the tables."""
        return self.budgets or budgets_of(self.plans)

    @property
    def question_phase(self) -> Phase:
        """The phase of the question's tokens."""
        return SETUPS[self.setup]

    @cached_property
    def jobs(self) -> tuple[Job, ...]:
        """Jobs of all tasks: the first context of each task and length before the second of any, so that half a run
        fills half of every table."""
        counts = {(task, length): self._contexts(task, length) for length in self.lengths for task in self.tasks}
        return tuple(
            Job(task, length, self.seed + index)
            for index in range(max(counts.values(), default=0))
            for (task, length), count in counts.items()
            if index < count
        )

    def _contexts(self, task: str, length: int) -> int:
        questions = find_task(task).num_questions(length, self.questions_per_context)
        return -(-self.questions_per_task // questions)


def _check_setup(setup: str, row: PlanRow) -> None:
    plan = parse_plan(row.plan)
    rule = plan.prefill
    prefill = rule is not None and not rule.method.traits.unbounded
    if setup == "whole_prompt" and prefill:
        raise UnsupportedPlan(
            f'the plan {row.plan} selects in prefill, but setup = "whole_prompt" prefills densely. Leave out its '
            'prefill rule, or choose setup = "sparse_prefill".'
        )
    if setup == "sparse_prefill" and row.phase is not None and not prefill:
        raise UnsupportedPlan(
            f'the plan {row.plan} has no rule for prefill, which setup = "sparse_prefill" evaluates. Write one, such '
            'as prefill=quoka:budget={budget}, or choose setup = "whole_prompt".'
        )


def _refusal(error: ValidationError, recipe: str) -> InputError:
    """Return the first thing that is wrong with a recipe, in words."""
    found, *others = error.errors()
    where, given = ".".join(map(str, found["loc"])), found["input"]
    if found["type"] == "value_error":  # of ``__post_init__``
        return InvalidValue(str(found["ctx"]["error"]))
    if found["type"] == "unexpected_keyword_argument":
        known = fields(TaskFile if len(found["loc"]) > 1 else EvalRecipe)
        return unknown(f"key of the recipe {recipe}", str(found["loc"][-1]), ["length", *(each.name for each in known)])
    if found["type"] == "missing":
        missing = [".".join(map(str, each["loc"])) for each in (found, *others) if each["type"] == "missing"]
        return MissingInput(f"the recipe {recipe} is not complete; it lacks {', '.join(missing)}.")
    if found["type"] == "too_short":
        return MissingInput(f'the recipe {recipe} has no {where}. Give one or more, such as "quest:budget={{budget}}".')
    expected = found["msg"].replace("Input", "it").replace("tuple", "list")
    return InvalidValue(f"the recipe {recipe} has {where} = {given!r}: {expected}.")


def digest(path: Path) -> str:
    """Return the digest of a file, or of all files of a directory with their names."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    digests = [(str(file.relative_to(path.parent)), hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()
