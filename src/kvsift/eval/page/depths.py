"""Heat maps: how often an answer was right, by the length of the context and the depth at which the answer stood."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean
from typing import Any

from kvsift.eval.page.html import details, escaped, figure

BINS = 10
CELL, ROW, LEFT, TOP = 44, 17, 66, 18

Cells = dict[tuple[Any, int], list[float]]
"""(length, bin of the depth) -> scores."""


def render(result: dict[str, Any]) -> str:
    """Maps of every plan and budget, folded up by task; of tasks whose answers stand somewhere."""
    rows = {row["plan"]: row for row in result["rows"]}
    tasks: dict[str, dict[str, Cells]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for sample in result["samples"]:
        if sample["length"] and sample.get("depth") is not None and "nll" not in sample:
            depth = min(int(sample["depth"] * BINS), BINS - 1)
            tasks[sample["task"]][sample["plan"]][sample["length"], depth].append(sample["score"])
    parts = []
    for index, task in enumerate(task for task in result["recipe"]["tasks"] if task in tasks):
        plans = tasks[task]
        maps = []
        for plan in (plan for plan in rows if plan in plans):
            row = rows[plan]
            name = row["name"] if row["budget"] is None else f"{row['name']}, {row['budget']:,}"
            maps.append(figure(name, _map(f"{task}, {name}", plans[plan])))
        parts.append(details(task, f"<div class=maps>{''.join(maps)}</div>", is_open=index == 0))
    return (
        "<p class=soft>Rows are depths, from the beginning of the context down to its end.</p>" + "".join(parts)
        if parts
        else ""
    )


def _map(title: str, cells: Cells) -> str:
    lengths = sorted({length for length, _ in cells})
    width, height = LEFT + CELL * len(lengths) + 2, TOP + ROW * BINS + 2
    parts = [f'<text x="{LEFT + CELL * (i + 0.5)}" y="12" text-anchor="middle">{_short(length)}</text>'
             for i, length in enumerate(lengths)]  # fmt: skip
    said = []
    for depth in range(BINS):
        y = TOP + ROW * depth
        label = f"{100 * depth // BINS}-{100 * (depth + 1) // BINS} %"
        parts.append(f'<text x="{LEFT - 5}" y="{y + 12}" text-anchor="end">{label}</text>')
        for index, length in enumerate(lengths):
            scores = cells.get((length, depth), [])
            parts.append(_cell(LEFT + CELL * index, y, scores, f"{length:,} tokens, depth {label}"))
            said += [f"{length:,} tokens at {label}: {fmean(scores):.2f}"] if scores else []
    return (f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img"><title>{escaped(title)}</title>'
            f"<desc>{escaped('; '.join(said))}</desc>{''.join(parts)}</svg>")  # fmt: skip


def _cell(x: int, y: int, scores: list[float], where: str) -> str:
    if not scores:
        return f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{ROW - 2}" fill="none" stroke="var(--line)"/>'
    mean = fmean(scores)
    ink = "var(--heatink)" if mean > 0.5 else "var(--ink)"
    return (
        f"<g><title>{escaped(where)}: {mean:.2f} of {len(scores)}</title>"
        f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{ROW - 2}" rx="2" '
        f'style="fill:color-mix(in srgb,var(--heat1) {100 * mean:.0f}%,var(--heat0))"/>'
        f'<text x="{x + CELL / 2 - 1}" y="{y + 11.5}" text-anchor="middle" style="fill:{ink}">{mean:.2f}</text></g>'
    )


def _short(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else f"{length:,}"
