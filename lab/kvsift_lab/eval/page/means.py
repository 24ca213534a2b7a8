"""Means of plans over all tasks of a length: score, visible tokens, times and memory; and the best plan."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles
from typing import Any

from kvsift_lab.eval.page.parts import percent
from kvsift_lab.numbers import grouped

ORDER = "ceiling", "plan", "floor"


@dataclass(frozen=True)
class PlanMean:
    """One plan at one budget and length.

    Attributes:
        score: mean over tasks; None if one of the tasks is missing.
        tokens: visible tokens, counted.
        tpot_s: first quartile, median, third quartile.
        kv_bytes: median.
        path: of the decode steps (``Answer.path``).
    """

    name: str
    budget: int | None
    role: str
    phase: str | None
    length: int | None
    score: float | None
    tokens: float | None
    ttft_s: float | None
    tpot_s: tuple[float, float, float] | None
    kv_bytes: float | None
    path: str
    num_answers: int
    label: str  # name, with the budget if there are several

    @property
    def is_reference(self) -> bool:
        return self.role != "plan"

    @property
    def is_dense(self) -> bool:
        return self.phase is None


def means_of(result: dict[str, Any]) -> list[PlanMean]:
    """Return the means of all plans at all budgets and lengths: dense, oracles, plans, floors."""
    samples, cells = (grouped(result[key], "length", "plan") for key in ("samples", "cells"))
    lengths = sorted({length for length, _ in cells}, key=lambda length: length or 0)
    rows = sorted(result["rows"], key=lambda row: (ORDER.index(row["role"]), row["phase"] is not None))  # stable
    several = len({row["budget"] for row in rows if row["budget"] is not None}) > 1
    means = []
    for length in lengths:
        num_tasks = len({cell["task"] for cell in result["cells"] if cell["length"] == length})
        for row in rows:
            if own := cells.get((length, row["plan"])):
                complete, answers = own if len(own) == num_tasks else [], samples.get((length, row["plan"]), [])
                means.append(_mean(row, length, complete, answers, several))
    return means


def _mean(
    row: dict[str, Any], length: int | None, cells: list[dict[str, Any]], samples: list[dict[str, Any]],
    with_budget: bool,
) -> PlanMean:  # fmt: skip
    times, sizes, first, tokens = (
        [value for item in group if (value := item.get(key)) is not None]
        for group, key in ((samples, "tpot_s"), (samples, "kv_bytes"), (samples, "ttft_s"), (cells, "counted_tokens"))
    )
    return PlanMean(
        name=row["name"],
        budget=row["budget"],
        role=row["role"],
        phase=row["phase"],
        length=length,
        score=fmean(cell["score"] for cell in cells) if cells else None,
        tokens=fmean(tokens) if tokens else None,
        ttft_s=median(first) if first else None,
        tpot_s=_quartiles(times) if times else None,
        kv_bytes=median(sizes) if sizes else None,
        path=next((sample["path"] for sample in samples if sample.get("path")), ""),
        num_answers=len(samples),
        label=row["name"] if row["budget"] is None or not with_budget else f"{row['name']}, {row['budget']:,}",
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = quantiles(values, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return low, middle, high


def lengths_of(means: Sequence[PlanMean]) -> list[int | None]:
    """Return the lengths of means in their order."""
    return list(dict.fromkeys(mean.length for mean in means))


def at_length(means: Sequence[PlanMean], length: int | None) -> list[PlanMean]:
    """Return the means of a length."""
    return [mean for mean in means if mean.length == length]


def dense_of(means: Sequence[PlanMean], length: int | None) -> PlanMean | None:
    """Return the dense plan of a length."""
    return next((mean for mean in means if mean.is_dense and mean.length == length), None)


def percent_of_dense(own: PlanMean, dense: PlanMean | None) -> str:
    """Return the score as percent of the dense score."""
    return percent(own.score, dense.score if dense else None)


def place(where: tuple[str, Any]) -> str:
    """Return a task and a length in words."""
    task, length = where
    return f"{task}, {length:,} tokens" if length else task


def is_unsolved(result: dict[str, Any], length: int | None) -> bool:
    """Return whether dense is not measurably better than chance in every task of a length."""
    tasks = {cell["task"] for cell in result["cells"] if cell["length"] == length}
    return tasks <= {task for task, at in result["unsolved"] if at == length}


def headline(result: dict[str, Any], means: Sequence[PlanMean]) -> str:
    """Return the plan with the highest mean over all tasks and lengths; of equals, that with fewest visible tokens."""
    if means and all(is_unsolved(result, mean.length) for mean in means):
        return "Dense is not measurably better than chance in any task, so this result does not compare plans."
    lengths = {mean.length for mean in means}
    scores: dict[tuple[str, int | None, str], list[PlanMean]] = defaultdict(list)
    for mean in means:
        if mean.score is not None and (mean.is_dense or not mean.is_reference):
            scores[mean.name, mean.budget, "dense" if mean.is_dense else "plan"].append(mean)
    whole = {key: own for key, own in scores.items() if len(own) == len(lengths)}
    plans = [own for (*_, kind), own in whole.items() if kind == "plan"]
    if not plans:
        return "No plan has answered every task yet."
    best = max(plans, key=lambda own: (round(_score(own), 6), -_tokens(own)))
    dense = next((own for (*_, kind), own in whole.items() if kind == "dense"), None)
    tokens = _tokens(best) if best[0].budget is None else best[0].budget
    line = f"{best[0].name} at {tokens:,.0f} tokens: mean {_score(best):.3f}"
    if dense is None:
        return f"{line}; dense is not in the recipe."
    return f"{line}, {percent(_score(best), _score(dense))} of dense's {_score(dense):.3f}."


def _score(own: Sequence[PlanMean]) -> float:
    return fmean(mean.score or 0.0 for mean in own)


def _tokens(own: Sequence[PlanMean]) -> float:
    return fmean(mean.tokens or 0.0 for mean in own)


def short_names(result: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the result with names without the settings that all plans share, and these settings."""
    plans = {row["name"] for row in result["rows"] if row["role"] == "plan"}
    shared = set.intersection(*(set(re.findall(r":([^:,]+)", name)) for name in plans)) if len(plans) > 1 else set()
    names = {row["name"]: row["name"] for row in result["rows"]}
    for setting in shared:
        names = {name: re.sub(f":{re.escape(setting)}(?=[:,]|$)", "", short) for name, short in names.items()}
    if not shared or len(set(names.values())) < len(names):
        return result, []
    renamed = {key: [{**item, "name": names[item["name"]]} for item in result[key]] for key in ("rows", "cells")}
    return {**result, **renamed}, sorted(shared)
