"""From samples to cells: mean scores with intervals, counted tokens, and what makes a comparison unfair."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import Any

from kvsift.errors import InputError
from kvsift.eval.intervals import design_effect, interval
from kvsift.eval.recipe import Job
from kvsift.eval.results import Result, job_of
from kvsift.eval.scorers import score

UNEQUAL = 0.05  # counted tokens of one column that differ by more are warned about
GUESSES = 32  # answers of other questions that chance is taken from
MEANS = "density", "recall", "recovery"
MEDIANS = "read_s", "ttft_s", "tpot_s", "kv_bytes"


def tables_of(recipe: dict[str, Any], samples: Sequence[Result], jobs: Iterable[Job]) -> dict[str, Any]:
    """What ``summary.json`` says beside the recipe, computed from nothing but the samples.

    Returns:
        cells: one per task, length, plan and budget.
        chance: per task and length, the score of answers to other questions of it.
        design_effects: per task, how many questions that share contexts count as one; None where each cell has only
            one context, whose intervals speak of that context alone.
        warnings: in plain words.
        left_out: contexts that are not finished, with how many of their samples are there.
        contexts: all that were wanted.

    Raises:
        InputError: if a sample is of a task or a plan that the recipe does not have.
    """
    groups: dict[tuple[Any, ...], list[Result]] = defaultdict(list)
    for sample in samples:
        groups[_order(recipe, sample)].append(sample)
    rows = {row["plan"]: row for row in recipe["rows"]}
    effects = design_effects(groups.values())
    cells = [_cell(rows[group[0]["plan"]], group, effects) for _, group in sorted(groups.items())]
    jobs = list(jobs)
    return {
        "cells": cells,
        "chance": chance(samples),
        "design_effects": effects,
        "warnings": [*unequal(cells), *alone(effects)],
        "left_out": left_out(recipe, samples, jobs),
        "contexts": [list(job) for job in jobs],
    }


def _order(recipe: dict[str, Any], sample: Result) -> tuple[Any, ...]:
    names = [*recipe["tasks"], *(file["name"] for file in recipe["files"])]
    plans = [row["plan"] for row in recipe["rows"]]
    return _place("task", sample["task"], names), sample["length"] or 0, _place("plan", sample["plan"], plans)


def _place(what: str, name: str, known: Sequence[str]) -> int:
    if name not in known:
        raise InputError(
            f"a sample is of the {what} {name!r}, which the recipe of these results does not have; it has "
            f"{', '.join(known)}. Samples and recipe are of different runs: give the directory that kvsift eval wrote."
        )
    return known.index(name)


def design_effects(groups: Iterable[Sequence[Result]]) -> dict[str, float | None]:
    """Per task, over all lengths and plans; each group is one cell's samples."""
    cells: dict[str, list[list[list[float]]]] = defaultdict(list)
    for samples in groups:
        contexts: dict[int, list[float]] = defaultdict(list)
        for sample in samples:
            contexts[sample["seed"]].append(sample["score"])
        cells[samples[0]["task"]].append(list(contexts.values()))
    single = {task for task, of in cells.items() if all(len(context) == 1 for each in of for context in each)}
    return {task: 1.0 if task in single else design_effect(of) for task, of in cells.items()}


def alone(effects: dict[str, float | None]) -> list[str]:
    """A sentence if questions of a cell share one context."""
    tasks = [task for task, effect in effects.items() if effect is None]
    return [] if not tasks else [
        f"{', '.join(tasks)}: all questions of a plan and length share one context, so intervals speak of that context "
        "alone. Lower questions_per_context, or raise questions_per_task."
    ]  # fmt: skip


def _cell(row: dict[str, Any], samples: Sequence[Result], effects: dict[str, float | None]) -> dict[str, Any]:
    scores = [sample["score"] for sample in samples]
    low, high = interval(scores, effects[samples[0]["task"]] or 1.0)
    key = "prefill_visible_tokens" if row["phase"] == "prefill" else "sparse_layer_visible_tokens"
    losses = [sample["nll"] for sample in samples if "nll" in sample]
    return {
        "task": samples[0]["task"],
        "length": samples[0]["length"],
        **row,
        "setup": samples[0]["setup"],
        "num_samples": len(scores),
        "score": fmean(scores),
        "low": low,
        "high": high,
        "counted_tokens": _over(fmean, samples, key if row["phase"] else "visible_tokens"),
        **({"nll": fmean(losses)} if losses else {}),
        **{each: _over(fmean, samples, each) for each in MEANS},
        **{each: _over(median, samples, each) for each in MEDIANS},
    }


def _over(statistic: Callable[[list[float]], float], samples: Iterable[Result], key: str) -> float | None:
    values = [value for sample in samples if (value := sample.get(key)) is not None]
    return statistic(values) if values else None


def chance(samples: Iterable[Result]) -> list[dict[str, Any]]:
    """Per task and length: how right answers of the right kind are that know nothing of the context, taken from the
    references of other questions."""
    questions: dict[tuple[str, Any], dict[tuple[int, int], Result]] = defaultdict(dict)
    for sample in samples:
        if sample.get("references"):
            questions[sample["task"], sample["length"]].setdefault((sample["seed"], sample["question"]), sample)
    found = []
    for (task, length), asked in questions.items():
        ordered = [asked[key] for key in sorted(asked)]
        scores = [
            score(one["scorer"], other["references"][0], one["references"])
            for index, one in enumerate(ordered)
            for other in [*ordered[index + 1 :], *ordered[:index]][:GUESSES]
        ]
        if scores:
            found.append({"task": task, "length": length, "score": fmean(scores), "num_guesses": len(scores)})
    return found


def unequal(cells: Iterable[dict[str, Any]]) -> list[str]:
    """A sentence for every budget at which plans were not shown equally many tokens, over all tasks and lengths."""
    columns: dict[tuple[int, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        if cell["budget"] is not None and cell["phase"] and cell["counted_tokens"]:
            columns[cell["budget"], cell["phase"]][cell["name"]].append(cell["counted_tokens"])
    found = []
    for (budget, phase), counted in sorted(columns.items()):
        means = sorted((fmean(tokens), name) for name, tokens in counted.items())
        (least, fewest), (most, largest) = means[0], means[-1]
        if least < (1 - UNEQUAL) * most:
            found.append(
                f"budget {budget:,} in {phase}: {fewest} was shown {least:,.0f} tokens, {largest} {most:,.0f}. Compare "
                "plans of that column by their counted tokens."
            )
    return found


def left_out(recipe: dict[str, Any], samples: Iterable[Result], jobs: Iterable[Job]) -> list[dict[str, Any]]:
    """Contexts that are not finished."""
    counts: dict[Job, int] = defaultdict(int)
    wanted: dict[Job, int] = {}
    for sample in samples:
        counts[job_of(sample)] += 1
        wanted[job_of(sample)] = sample["questions"] * len(recipe["rows"])
    return [
        {**job._asdict(), "samples": counts[job], "of": wanted.get(job)}
        for job in jobs
        if counts[job] < wanted.get(job, 1)
    ]
