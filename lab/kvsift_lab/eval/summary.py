"""Cells of samples: mean scores with intervals, counted tokens, and warnings about unfair comparisons."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import Any

from kvsift.errors import OtherModel
from kvsift_lab.eval.intervals import design_effect, interval
from kvsift_lab.eval.recipe import Job, Result
from kvsift_lab.eval.scorers import score
from kvsift_lab.numbers import grouped

UNEQUAL = 0.05  # the largest difference of counted tokens in a column without a warning
GUESSES = 32  # answers of other questions per question, for the score of chance
MEANS = "density", "recall", "recovery"
MEDIANS = "read_s", "ttft_s", "tpot_s", "kv_bytes"


def tables_of(recipe: dict[str, Any], samples: Sequence[Result], jobs: Iterable[Job]) -> dict[str, Any]:
    """Return the tables of ``summary.json``, computed from the samples alone.

    Returns:
        cells: one per task, length, plan and budget.
        chance: per task and length, the score of answers to its other questions.
        design_effects: per task, the number of questions in shared contexts that count as one; None if each cell has
            one context, whose intervals hold for that context alone.
        warnings: sentences; stored results have them, so their wording is part of the format.
        unsolved: tasks and lengths at which dense is not measurably better than chance, so plans cannot be compared.
        left_out: unfinished contexts with their numbers of samples.
        contexts: all contexts of the recipe.

    Raises:
        InputError: if a sample has a task or a plan that is not in the recipe.
    """
    groups: dict[tuple[Any, ...], list[Result]] = defaultdict(list)
    for sample in samples:
        groups[_order(recipe, sample)].append(sample)
    rows = {row["plan"]: row for row in recipe["rows"]}
    effects = design_effects(groups.values())
    cells = [_cell(rows[group[0]["plan"]], group, effects) for _, group in sorted(groups.items())]
    jobs, by_chance = list(jobs), chance(samples)
    unsolved = unsolved_by_dense(cells, by_chance)
    unfair = [*mixed_scorers(samples), *unequal(cells), *skipped_nothing(cells), *shared_context(effects)]
    return {
        "cells": cells,
        "chance": by_chance,
        "design_effects": effects,
        "warnings": [*unsolved_tasks(unsolved), *unfair],
        "unsolved": [list(where) for where in unsolved],
        "left_out": left_out(recipe, samples, jobs),
        "contexts": [list(job) for job in jobs],
    }


def _order(recipe: dict[str, Any], sample: Result) -> tuple[Any, ...]:
    names = [*recipe["tasks"], *(file["name"] for file in recipe["files"])]
    plans = [row["plan"] for row in recipe["rows"]]
    return _index("task", sample["task"], names), sample["length"] or 0, _index("plan", sample["plan"], plans)


def _index(what: str, name: str, names: Sequence[str]) -> int:
    if name not in names:
        raise OtherModel(
            f"a sample has the {what} {name!r}, which is not in the recipe of these results; it has "
            f"{', '.join(names)}. Give a directory that kvsift eval wrote."
        )
    return names.index(name)


def design_effects(groups: Iterable[Sequence[Result]]) -> dict[str, float | None]:
    """Return the design effect of each task over all lengths and plans; a group is the samples of a cell."""
    cells: dict[str, list[list[list[float]]]] = defaultdict(list)
    for samples in groups:
        contexts = grouped(samples, "seed").values()
        cells[samples[0]["task"]].append([[sample["score"] for sample in context] for context in contexts])
    return {
        task: 1.0 if all(len(context) == 1 for cell in own for context in cell) else design_effect(own)
        for task, own in cells.items()
    }


def unsolved_by_dense(
    cells: Iterable[dict[str, Any]], by_chance: Iterable[dict[str, Any]]
) -> list[tuple[str, int | None]]:
    """Return the tasks and lengths where the interval of dense reaches down to the score of chance."""
    levels = {(row["task"], row["length"]): row["score"] for row in by_chance}
    places = [(cell["task"], cell["length"], cell["low"]) for cell in cells if cell["phase"] is None]
    return [(task, length) for task, length, low in places if low <= levels.get((task, length), 0.0)]


def unsolved_tasks(unsolved: Iterable[tuple[str, int | None]]) -> list[str]:
    """Return a warning if dense is not measurably better than chance somewhere."""
    places = ", ".join(f"{task} at {length:,}" if length else task for task, length in unsolved)
    return [] if not places else [
        f"{places}: dense is not measurably better than chance, so the scores there do not compare plans. Take a model "
        "that solves the task, a shorter context or more questions, and read some of its answers."
    ]  # fmt: skip


def mixed_scorers(samples: Iterable[Result]) -> list[str]:
    """Return a warning if an earlier version has scored answers of a chat model by their first lines."""
    scorers: dict[str, set[str]] = defaultdict(set)
    for sample in samples:
        scorers[sample["task"]].add(sample.get("scorer", "exact"))
    mixed = [task for task, names in scorers.items() if names >= {"exact", "contains"}]
    return [] if not mixed else [
        f"{', '.join(mixed)}: some samples are scored by exact, as an earlier version did, and others by contains. "
        "Give another --out to score all alike."
    ]  # fmt: skip


def shared_context(effects: dict[str, float | None]) -> list[str]:
    """Return a warning if all questions of a cell share one context."""
    tasks = [task for task, effect in effects.items() if effect is None]
    return [] if not tasks else [
        f"{', '.join(tasks)}: all questions of a plan and length share one context, so intervals speak of that context "
        "alone. Lower questions_per_context, or raise questions_per_task."
    ]  # fmt: skip


def _cell(row: dict[str, Any], samples: Sequence[Result], effects: dict[str, float | None]) -> dict[str, Any]:
    scores = [sample["score"] for sample in samples]
    low, high = interval(scores, effects[samples[0]["task"]] or 1.0)
    counted = "prefill_visible_tokens" if row["phase"] == "prefill" else "sparse_layer_visible_tokens"
    predicted = {key: [sample[key] for sample in samples if key in sample] for key in ("nll", "kl", "agreement")}
    return {
        "task": samples[0]["task"],
        "length": samples[0]["length"],
        **row,
        "setup": samples[0]["setup"],
        "num_samples": len(scores),
        "score": fmean(scores),
        "low": low,
        "high": high,
        "counted_tokens": _over(fmean, samples, counted if row["phase"] else "visible_tokens"),
        **{key: fmean(numbers) for key, numbers in predicted.items() if numbers},
        **{key: _over(fmean, samples, key) for key in MEANS},
        **{key: _over(median, samples, key) for key in MEDIANS},
    }


def _over(statistic: Callable[[list[float]], float], samples: Iterable[Result], key: str) -> float | None:
    values = [value for sample in samples if (value := sample.get(key)) is not None]
    return statistic(values) if values else None


def chance(samples: Iterable[Result]) -> list[dict[str, Any]]:
    """Return the score of chance per task and length: references of other questions as answers."""
    questions: dict[tuple[str, Any], dict[tuple[int, int], Result]] = defaultdict(dict)
    for sample in samples:
        if sample.get("references"):
            questions[sample["task"], sample["length"]].setdefault((sample["seed"], sample["question"]), sample)
    rows = []
    for (task, length), own in questions.items():
        ordered = [own[key] for key in sorted(own)]
        scores = [
            score(one["scorer"], other["references"][0], one["references"])
            for index, one in enumerate(ordered)
            for other in [*ordered[index + 1 :], *ordered[:index]][:GUESSES]
        ]
        if scores:
            rows.append({"task": task, "length": length, "score": fmean(scores), "num_guesses": len(scores)})
    return rows


def unequal(cells: Iterable[dict[str, Any]]) -> list[str]:
    """Return a warning for every budget at which the plans have unequal visible tokens, over all tasks and lengths."""
    columns: dict[tuple[int, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        if cell["budget"] is not None and cell["phase"] and cell["counted_tokens"]:
            columns[cell["budget"], cell["phase"]][cell["name"]].append(cell["counted_tokens"])
    warnings = []
    for (budget, phase), counted in sorted(columns.items()):
        means = sorted((fmean(tokens), name) for name, tokens in counted.items())
        (least, fewest), (most, largest) = means[0], means[-1]
        if least < (1 - UNEQUAL) * most:
            warnings.append(
                f"budget {budget:,} in {phase}: {fewest} was shown {least:,.0f} tokens, {largest} {most:,.0f}. Compare "
                "plans of that column by their counted tokens."
            )
    return warnings


def skipped_nothing(cells: Iterable[dict[str, Any]]) -> list[str]:
    """Return a warning for every budget at which sparse plans have read everything, with all of its tasks and lengths.
    A cell without counted tokens had no sparse query in its phase."""
    names: dict[tuple[int | None, str], list[str]] = defaultdict(list)
    for cell in cells:
        if cell["phase"] and cell["counted_tokens"] is None and cell["density"] == 1:
            place = f"{cell['task']} at {cell['length']:,}" if cell["length"] else cell["task"]
            names[cell["budget"], place].append(cell["name"])
    places: dict[tuple[int | None, str], list[str]] = defaultdict(list)
    for (budget, place), own in names.items():
        places[budget, ", ".join(own)].append(place)
    return [
        f"{'' if budget is None else f'budget {budget:,}: '}{plans} skipped nothing in {', '.join(where)}: every query "
        "saw its whole context, as under dense. Give a smaller budget, longer contexts or fewer dense layers."
        for (budget, plans), where in places.items()
    ]


def left_out(recipe: dict[str, Any], samples: Iterable[Result], jobs: Iterable[Job]) -> list[dict[str, Any]]:
    """Return the unfinished contexts."""
    left = []
    by_job = grouped(samples, *Job._fields)
    for job in jobs:
        own = by_job.get(job, [])
        total = own[-1]["questions"] * len(recipe["rows"]) if own else None
        if len(own) < (1 if total is None else total):
            left.append({**job._asdict(), "samples": len(own), "of": total})
    return left
