"""Heat maps: scores by length of the context and depth of the answer; recall and recovered mass of each layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from kvsift_lab.eval.page.means import PlanMean
from kvsift_lab.eval.page.parts import Fold, Parts, Table, heat
from kvsift_lab.numbers import grouped

BINS = 10, 5  # of the depth; the most that the samples fill
WIDEST = 24  # columns
FILLED = 0.8  # the least share of cells with samples
MEASURES = {2: "Top-10 token recall", 3: "Attention mass recovered"}  # by index in the counters of a layer

Column = tuple[int, int]
"""Length, bin of the depth."""

Values = dict[tuple[int, int, str, int], list[float]]
"""By budget, measure, name and layer."""


def depths(result: dict[str, Any], means: Sequence[PlanMean]) -> Parts:
    """Return a folded map per task with depths: a row per plan, a column per length and depth."""
    deep = [s for s in result["samples"] if s["length"] and s.get("depth") is not None and "nll" not in s]
    groups = grouped(deep, "task")
    rows = {row["plan"]: (row["name"], row["budget"]) for row in result["rows"]}
    order = {(mean.name, mean.budget): mean for mean in means}
    parts: Parts = []
    for task in (task for task in result["recipe"]["tasks"] if task in groups):
        if count := _num_bins(groups[task]):
            parts.append(Fold(task, [_depth_map(task, groups[task], count, rows, order)]))
    return ["Columns are depths, from the start of the context to its end.", *parts] if parts else []


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


def _depth_map(
    task: str, samples: Sequence[dict[str, Any]], count: int, rows: dict[str, tuple[str, int | None]],
    order: dict[tuple[str, int | None], PlanMean],
) -> Table:  # fmt: skip
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
    return Table(["plan", *names], lines, caption, soft)


def _depth(length: int, depth: int, count: int, with_length: bool) -> str:
    where = f"{100 * depth // count}-{100 * (depth + 1) // count} %"
    short = f"{length // 1024}K" if length % 1024 == 0 else f"{length:,}"
    return f"{short}, {where}" if with_length else where


def layers(result: dict[str, Any], means: Sequence[PlanMean]) -> Parts:
    """Return two tables per budget, over all tasks and lengths: a row per plan, a column per layer."""
    rows = {row["plan"]: row for row in result["rows"]}
    values: Values = defaultdict(list)
    for sample in result["samples"]:
        row = rows[sample["plan"]]
        for layer in sample.get("layers", ()):
            for measure in MEASURES:
                if row["budget"] is not None and layer[measure] is not None:
                    values[row["budget"], measure, row["name"], layer[0]].append(layer[measure])
    budgets = sorted({budget for budget, *_ in values})
    names = {mean.name: mean.is_reference for mean in means}
    parts = []
    for budget in budgets:
        tables = [_layer_table(values, budget, measure, names) for measure in MEASURES]
        parts.append(Fold(f"Budget {budget:,}", tables, budget == budgets[len(budgets) // 2]))
    note = "Means over all tasks and lengths from sampled decode steps, without dense layers."
    return [note, *parts] if parts else []


def _layer_table(values: Values, budget: int, measure: int, names: dict[str, bool]) -> Table:
    own = {key[2:]: fmean(own) for key, own in values.items() if key[:2] == (budget, measure)}
    layers = sorted({layer for _, layer in own})
    present = [name for name in names if any((name, layer) in own for layer in layers)]
    rows = [[name, *(heat(own.get((name, layer)), f"{name}, layer {layer}") for layer in layers)] for name in present]
    soft = [index for index, name in enumerate(present) if names[name]]
    head = ["plan", *(f"layer {layer}" for layer in layers)]
    return Table(head, rows, f"{MEASURES[measure]}, budget {budget:,}", soft)
