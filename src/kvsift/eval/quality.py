"""Exact match of many plans on the same prefilled contexts: the table that separates the methods.

Per context: prefill once, densely; then every plan answers every question from that cache. The question's own tokens
are decoded under the plan as well (``question_phase = "decode"``), so a method cannot lean on a dense look at them.
"""

from __future__ import annotations

import os
import platform
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import MISSING, asdict, dataclass, fields
from importlib.metadata import version
from multiprocessing import active_children, get_context
from pathlib import Path
from signal import SIG_IGN, SIGINT, signal
from typing import Any

from kvsift import __version__
from kvsift.engine.prompt import exact_match, question_text
from kvsift.errors import InputError, unknown
from kvsift.eval.tasks import TASKS, find_task, make_sample
from kvsift.methods.base import Phase
from kvsift.runtime.plan import PHASES
from kvsift.runtime.spec import parse_plan

MAX_NEW_TOKENS = 40
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


def run(recipe: Recipe, workers: int, on_job: Callable[[int, int], None]) -> dict[str, Any]:
    """Run a recipe, contexts in parallel; ``on_job`` is told (contexts done, contexts in all).

    Returns:
        A JSON document: recipe, versions, machine and one sample per question and cell.

    Raises:
        InputError: before anything runs for a model or device that cannot be used; later if a worker dies.
    """
    from kvsift.engine.llm import LLM

    LLM(recipe.model, "dense", device=recipe.device, dtype=recipe.dtype)
    jobs = recipe.jobs()
    samples: list[dict[str, Any]] = []
    threads = max(1, (os.cpu_count() or 1) // workers)
    others = active_children()
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_leave_interruptions_to_the_parent) as pool:
        try:
            running = [pool.submit(run_job, recipe, task, seed, threads) for task, seed in jobs]
            for done, future in enumerate(as_completed(running), 1):
                samples.extend(future.result())
                on_job(done, len(jobs))
        except BaseException as error:  # an interruption too: do not wait for contexts nobody will look at
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in [child for child in active_children() if child not in others]:
                worker.terminate()
                worker.join()
            if isinstance(error, BrokenProcessPool):
                raise InputError(
                    f"a worker died, probably for lack of memory. {workers} ran at a time; give fewer --workers."
                ) from error
            raise
    samples.sort(key=lambda s: (s["task"], s["seed"], s["plan"], s["question"]))
    return {"kind": "quality", "recipe": asdict(recipe), **provenance(recipe), "samples": samples}


def _leave_interruptions_to_the_parent() -> None:
    signal(SIGINT, SIG_IGN)


def run_job(recipe: Recipe, task: str, seed: int, threads: int) -> list[dict[str, Any]]:
    """All plans on one context."""
    import torch

    from kvsift.engine.llm import LLM, Document

    torch.set_num_threads(threads)
    llm = LLM(recipe.model, "dense", device=recipe.device, dtype=recipe.dtype)

    def encode(text: str) -> list[int]:
        ids: list[int] = llm.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    bos = llm.tokenizer.bos_token_id
    prefix = [] if bos is None else [bos]
    try:
        sample = make_sample(task, recipe.length, seed, encode, recipe.questions_per_context, prefix)
    except ValueError as error:
        raise InputError(f"task {task!r} cannot be made: {error}") from error
    ids = list(sample.context_ids)
    document = Document(llm, ids, lambda question: ids + encode(question_text(question)), llm.plan)
    results = []
    for spec, budget in recipe.rows():
        for index, question in enumerate(sample.questions):
            answer = document.ask(
                question.text, plan=spec, max_new_tokens=MAX_NEW_TOKENS, question_phase=recipe.question_phase
            )
            results.append(
                {
                    "task": task,
                    "seed": seed,
                    "question": index,
                    "depth": round(question.depth, 4),
                    "plan": spec,
                    "budget": budget,
                    "expected": question.answer,
                    "answer": answer.text,
                    "correct": exact_match(answer.text, question.answer),
                    **{key: answer.decode(key) for key in ("visible_tokens", "density", "recall", "recovery")},
                    "sparse_layer_visible_tokens": _sparse_visible(answer.stats["layers"]),
                }
            )
    return results


def _list_of(key: str, value: object, kind: type) -> None:
    if isinstance(value, tuple) and value and all(type(each) is kind for each in value):
        return
    raise InputError(f"{key}={value!r} of a recipe must be a list of {'names' if kind is str else 'whole numbers'}.")


def provenance(recipe: Recipe) -> dict[str, Any]:
    """Where and with what numbers were made."""
    import torch

    from kvsift.models.transformers_load import choose_device

    device = choose_device(recipe.device)
    return {
        "commit": _commit(),
        "versions": {
            "kvsift": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
        },
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {os.cpu_count()} cores",
    }


def _commit() -> str:
    """The commit that runs; KVSIFT_COMMIT names it where the code was copied without its repository."""
    if "KVSIFT_COMMIT" in os.environ:
        return os.environ["KVSIFT_COMMIT"]
    root = Path(__file__).parent
    try:
        git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return git.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")


def _sparse_visible(layers: list[dict[str, Any]]) -> float | None:
    """Visible tokens per query in the layers that were not dense: what the budget is about."""
    sparse = [row for row in layers if row["phase"] == "decode" and row["sparse_queries"]]
    return sum(row["visible_tokens"] for row in sparse) / len(sparse) if sparse else None
