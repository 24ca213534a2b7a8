"""KV memory of each plan as bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvsift.eval.page.html import Cell, percent, shown, table
from kvsift.eval.page.means import Mean, dense_of

MIB = 1 << 20
ALIKE = 0.1  # budgets whose memory differs by less share a bar


class Bar(NamedTuple):
    label: str
    most: float  # bytes
    text: str
    is_reference: bool


def render(result: dict[str, Any], means: Sequence[Mean]) -> str:
    """A chart per length: a bar per plan, or per budget where that changes it."""
    lengths = list(dict.fromkeys(each.length for each in means if each.kv_bytes))
    note = "KV cache after an answer with what a method keeps beside it, median. The dashed line is dense."
    peaks = [sample["peak_memory_bytes"] for sample in result["samples"] if sample.get("peak_memory_bytes")]
    peak = f" Peak memory of a process: {max(peaks) / 2**30:.2f} GiB." if peaks else ""
    charts = "".join(_chart([each for each in means if each.length == length], length) for length in lengths)
    return f"<p class=soft>{note}{peak}</p>{charts}" if charts else ""


def _chart(means: Sequence[Mean], length: int | None) -> str:
    bars = [bar for name in dict.fromkeys(each.name for each in means) for bar in _bars(means, name)]
    most = max(bar.most for bar in bars)
    dense = dense_of(means, length)
    whole = dense.kv_bytes if dense else None
    rows = []
    for bar in bars:
        line = f";--dense:{100 * whole / most:.1f}%" if whole else ""
        drawn = f'<i style="--mean:{100 * bar.most / most:.1f}%{line}">{"<b></b>" if whole else ""}</i>'
        rows.append([bar.label, bar.text, percent(bar.most, whole), Cell(drawn, "bar")])
    soft = [index for index, bar in enumerate(bars) if bar.is_reference]
    return table(["plan", "KV, MiB", "of dense", ""], rows, f"{length:,} tokens" if length else "Files", soft)


def _bars(means: Sequence[Mean], name: str) -> list[Bar]:
    """One bar of a plan, or one per budget."""
    own = [(each, each.kv_bytes) for each in means if each.name == name and each.kv_bytes is not None]
    sizes = [size for _, size in own]
    if not own or max(sizes) > (1 + ALIKE) * min(sizes):
        return [Bar(each.label, size, shown(size / MIB, 1), each.is_reference) for each, size in own]
    low, high = shown(min(sizes) / MIB, 1), shown(max(sizes) / MIB, 1)
    return [Bar(name, max(sizes), low if low == high else f"{low} to {high}", own[0][0].is_reference)]
