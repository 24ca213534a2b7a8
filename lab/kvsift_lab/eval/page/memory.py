"""Bars of the KV cache of each plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvsift_lab.eval.page.html import Cell, percent, shown, table
from kvsift_lab.eval.page.means import PlanMean, dense_of

MIB = 1 << 20
ALIKE = 0.1  # budgets with a smaller difference share a bar


class Bar(NamedTuple):
    label: str
    most: float  # bytes
    text: str
    is_reference: bool


def render(result: dict[str, Any], means: Sequence[PlanMean]) -> str:
    """Return a chart per length: a bar per plan, or per budget if budgets differ."""
    lengths = list(dict.fromkeys(mean.length for mean in means if mean.kv_bytes))
    note = "KV cache after an answer with the state of the method, median. The dashed line is dense."
    peaks = [sample["peak_memory_bytes"] for sample in result["samples"] if sample.get("peak_memory_bytes")]
    peak = f" Peak memory of a process: {max(peaks) / 2**30:.2f} GiB." if peaks else ""
    charts = "".join(_chart([mean for mean in means if mean.length == length], length) for length in lengths)
    return f"<p class=soft>{note}{peak}</p>{charts}" if charts else ""


def _chart(means: Sequence[PlanMean], length: int | None) -> str:
    bars = [bar for name in dict.fromkeys(mean.name for mean in means) for bar in _bars(means, name)]
    most = max(bar.most for bar in bars)
    dense = dense_of(means, length)
    whole = dense.kv_bytes if dense else None
    rows = []
    for bar in bars:
        line = f";--dense:{100 * whole / most:.1f}%" if whole else ""
        drawn = f'<i style="--mean:{100 * bar.most / most:.1f}%{line}">{"<b></b>" if whole else ""}</i>'
        rows.append([bar.label, bar.text, percent(bar.most, whole), Cell(drawn, "bar")])
    soft = [index for index, bar in enumerate(bars) if bar.is_reference]
    return table(["plan", "KV cache, MiB", "of dense", ""], rows, f"{length:,} tokens" if length else "Files", soft)


def _bars(means: Sequence[PlanMean], name: str) -> list[Bar]:
    """Return one bar of a plan, or one per budget."""
    own = [(mean, mean.kv_bytes) for mean in means if mean.name == name and mean.kv_bytes is not None]
    sizes = [size for _, size in own]
    if not own or max(sizes) > (1 + ALIKE) * min(sizes):
        return [Bar(mean.label, size, shown(size / MIB, 1), mean.is_reference) for mean, size in own]
    low, high = shown(min(sizes) / MIB, 1), shown(max(sizes) / MIB, 1)
    return [Bar(name, max(sizes), low if low == high else f"{low} to {high}", own[0][0].is_reference)]
