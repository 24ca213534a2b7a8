"""Heat maps of the score by length of the context and depth of the answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from kvsift_lab.eval.page.html import details, heat, table
from kvsift_lab.eval.page.means import PlanMean

BINS = 10, 5  # of the depth; the most that the samples fill
WIDEST = 24  # columns
FILLED = 0.8  # the least share of cells with samples

Column = tuple[int, int]
"""Length, bin of the depth."""


def render(result: dict[str, Any], means: Sequence[PlanMean]) -> str:
    """Return a folded map per task with depths: a row per plan, a column per length and depth."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for sample in result["samples"]:
        if sample["length"] and sample.get("depth") is not None and "nll" not in sample:
            groups[sample["task"]].append(sample)
    rows = {row["plan"]: (row["name"], row["budget"]) for row in result["rows"]}
    order = {(mean.name, mean.budget): mean for mean in means}
    parts: list[str] = []
    for task in (task for task in result["recipe"]["tasks"] if task in groups):
        if count := _num_bins(groups[task]):
            parts.append(details(task, _map(task, groups[task], count, rows, order)))
    if not parts:
        return ""
    note = "Columns are depths, from the start of the context to its end."
    return f"<p class=soft>{note}</p>" + "".join(parts)


def _num_bins(samples: Sequence[dict[str, Any]]) -> int:
    """Return the most bins that are filled for every length and fit a screen, or 0."""
    plan = samples[0]["plan"]  # all plans have the same questions
    own = [sample for sample in samples if sample["plan"] == plan]
    num_lengths = len({sample["length"] for sample in own})
    for count in BINS:
        cells = {_column(sample, count) for sample in own}
        if num_lengths * count <= WIDEST and len(cells) >= FILLED * num_lengths * count:
            return count
    return 0


def _column(sample: dict[str, Any], count: int) -> Column:
    return sample["length"], min(int(sample["depth"] * count), count - 1)


def _map(
    task: str, samples: Sequence[dict[str, Any]], count: int, rows: dict[str, tuple[str, int | None]],
    order: dict[tuple[str, int | None], PlanMean],
) -> str:  # fmt: skip
    scores: dict[tuple[tuple[str, int | None], Column], list[float]] = defaultdict(list)
    for sample in samples:
        scores[rows[sample["plan"]], _column(sample, count)].append(sample["score"])
    lengths = sorted({sample["length"] for sample in samples})
    columns = [(length, depth) for length in lengths for depth in range(count)]
    names = [_depth(length, depth, count, len(lengths) > 1) for length, depth in columns]
    lines = []
    for key, mean in order.items():
        cells = [scores.get((key, column), []) for column in columns]
        hints = [f"{mean.label}, {column[0]:,} tokens, {_depth(*column, count, False)}" for column in columns]
        lines.append([mean.label, *(heat(fmean(own) if own else None, hint) for own, hint in zip(cells, hints))])
    soft = [index for index, mean in enumerate(order.values()) if mean.is_reference]
    caption = task if len(lengths) > 1 else f"{task}, {lengths[0]:,} tokens"
    return table(["plan", *names], lines, caption, soft)


def _depth(length: int, depth: int, count: int, with_length: bool) -> str:
    where = f"{100 * depth // count}-{100 * (depth + 1) // count} %"
    return f"{_short(length)}, {where}" if with_length else where


def _short(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else f"{length:,}"
