"""Plans over all tasks of a length: mean score, visible tokens, time per token, memory; and the best in one line."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles
from typing import Any

from kvsift.eval.page.html import percent

ORDER = "ceiling", "plan", "floor"


@dataclass(frozen=True)
class Mean:
    """One plan at one budget and length.

    Attributes:
        score: mean over tasks; None if one of the tasks is missing.
        tokens: visible tokens, counted.
        tpot_s: first quartile, median, third quartile.
        kv_bytes: median.
        path: how decode steps ran, "captured" if as a CUDA graph.
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
    label: str  # name, and budget where there are several

    @property
    def is_reference(self) -> bool:
        return self.role != "plan"

    @property
    def is_dense(self) -> bool:
        return self.phase is None


def means_of(result: dict[str, Any]) -> list[Mean]:
    """All plans at all budgets and lengths: dense, then oracles, plans, and floors."""
    samples: dict[tuple[Any, str], list[dict[str, Any]]] = defaultdict(list)
    cells: dict[tuple[Any, str], list[dict[str, Any]]] = defaultdict(list)
    for sample in result["samples"]:
        samples[sample["length"], sample["plan"]].append(sample)
    for cell in result["cells"]:
        cells[cell["length"], cell["plan"]].append(cell)
    lengths = sorted({length for length, _ in cells}, key=lambda length: length or 0)
    rows = sorted(result["rows"], key=lambda row: (ORDER.index(row["role"]), row["phase"] is not None))  # stable
    several = len({row["budget"] for row in rows if row["budget"] is not None}) > 1
    found = []
    for length in lengths:
        num_tasks = len({cell["task"] for cell in result["cells"] if cell["length"] == length})
        for row in rows:
            if own := cells.get((length, row["plan"])):
                complete = len(own) == num_tasks
                found.append(_mean(row, length, own if complete else [], samples[length, row["plan"]], several))
    return found


def _mean(
    row: dict[str, Any], length: int | None, cells: list[dict[str, Any]], samples: list[dict[str, Any]],
    with_budget: bool,
) -> Mean:  # fmt: skip
    times, kept, first, tokens = (
        [value for each in group if (value := each.get(key)) is not None]
        for group, key in ((samples, "tpot_s"), (samples, "kv_bytes"), (samples, "ttft_s"), (cells, "counted_tokens"))
    )
    return Mean(
        name=row["name"],
        budget=row["budget"],
        role=row["role"],
        phase=row["phase"],
        length=length,
        score=fmean(cell["score"] for cell in cells) if cells else None,
        tokens=fmean(tokens) if tokens else None,
        ttft_s=median(first) if first else None,
        tpot_s=_quartiles(times) if times else None,
        kv_bytes=median(kept) if kept else None,
        path=next((each["path"] for each in samples if each.get("path")), ""),
        num_answers=len(samples),
        label=row["name"] if row["budget"] is None or not with_budget else f"{row['name']}, {row['budget']:,}",
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = quantiles(values, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return low, middle, high


def dense_of(means: Sequence[Mean], length: int | None) -> Mean | None:
    """The dense run of a length."""
    return next((each for each in means if each.is_dense and each.length == length), None)


def percent_of_dense(own: Mean, dense: Mean | None) -> str:
    """What share the score is of dense's."""
    return percent(own.score, dense.score if dense else None)


def place(where: tuple[str, Any]) -> str:
    """A task and a length in words."""
    task, length = where
    return f"{task}, {length:,} tokens" if length else task


def headline(means: Sequence[Mean]) -> str:
    """The plan with the highest mean over all tasks and lengths, with the fewest tokens of those; next to dense."""
    lengths = {each.length for each in means}
    scores: dict[tuple[str, int | None, str], list[Mean]] = defaultdict(list)
    for each in means:
        if each.score is not None and (each.is_dense or not each.is_reference):
            scores[each.name, each.budget, "dense" if each.is_dense else "plan"].append(each)
    whole = {key: own for key, own in scores.items() if len(own) == len(lengths)}
    plans = [own for (*_, kind), own in whole.items() if kind == "plan"]
    if not plans:
        return "No plan has answered every task yet."
    best = max(plans, key=lambda own: (round(_score(own), 6), -_tokens(own)))
    dense = next((own for (*_, kind), own in whole.items() if kind == "dense"), None)
    shown = _tokens(best) if best[0].budget is None else best[0].budget
    line = f"{best[0].name} at {shown:,.0f} tokens: mean {_score(best):.3f}"
    if dense is None:
        return f"{line}; dense was not asked."
    if not _score(dense):
        return f"{line}; dense scores 0."
    return f"{line}, {percent(_score(best), _score(dense))} of dense's {_score(dense):.3f}."


def _score(own: Sequence[Mean]) -> float:
    return fmean(each.score or 0.0 for each in own)


def _tokens(own: Sequence[Mean]) -> float:
    return fmean(each.tokens or 0.0 for each in own)


def short_names(result: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The result with names that leave out the settings which all its plans share, and those settings."""
    plans = {row["name"] for row in result["rows"] if row["role"] == "plan"}
    shared = set.intersection(*(set(re.findall(r":([^:,]+)", name)) for name in plans)) if len(plans) > 1 else set()
    names = {row["name"]: row["name"] for row in result["rows"]}
    for setting in shared:
        names = {name: re.sub(f":{re.escape(setting)}(?=[:,]|$)", "", short) for name, short in names.items()}
    if not shared or len(set(names.values())) < len(names):
        return result, []
    renamed = {key: [{**each, "name": names[each["name"]]} for each in result[key]] for key in ("rows", "cells")}
    return {**result, **renamed}, sorted(shared)
