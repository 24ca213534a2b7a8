"""Times and memory of the evaluation, for comparisons between plans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from kvsift.engine.prefill_sharing import prefill_key
from kvsift.errors import InputError
from kvsift.plan.syntax import parse_plan
from kvsift_lab.eval.page.means import PlanMean, at_length, dense_of, lengths_of
from kvsift_lab.eval.page.parts import Cell, Heading, Parts, Table, percent, shown, text_cell

STEPS = {"captured": "CUDA graph", "": "-"}  # others are "native", or "composed: " and the reasons
MIB = 1 << 20
ALIKE = 0.1  # budgets with a smaller difference share a bar


def times(result: dict[str, Any], means: Sequence[PlanMean]) -> Parts:
    """Return a table per length over all tasks, and the times of prefill."""
    timed = [mean for mean in means if mean.ttft_s is not None]
    if not timed:
        return []
    note = f"Medians of single answers, with quartiles. TTFT counts from the cached context. {at_a_time(result)}"
    tables = [_times(at_length(timed, length), length) for length in lengths_of(timed)]
    return [note, *tables, *_prefill(result)]


def at_a_time(result: dict[str, Any]) -> str:
    """Return a warning if workers slowed each other."""
    together = max((session["workers"] for session in result["sessions"]), default=1)
    return f"{together} contexts ran at a time, which slows each." if together > 1 else ""


def _times(means: Sequence[PlanMean], length: int | None) -> Table:
    head = ["plan", "TTFT, ms", "TPOT, ms", "quartiles", "of dense", "decode step", "answers"]
    dense = dense_of(means, length)
    whole = dense.tpot_s[1] if dense and dense.tpot_s else None
    rows = []
    for mean in means:
        low, middle, high = mean.tpot_s or (None, None, None)
        spread = "-" if low is None else f"{_ms(low, 2)} to {_ms(high, 2)}"
        rows.append(
            [mean.label, _ms(mean.ttft_s, 1), _ms(middle, 2), spread, percent(middle, whole),
             STEPS.get(mean.path, mean.path.partition(":")[0]), mean.num_answers]
        )  # fmt: skip
    soft = [index for index, mean in enumerate(means) if mean.is_reference]
    return Table(head, rows, f"{length:,} tokens" if length else "Files", soft)


def _ms(seconds: float | None, digits: int) -> str:
    return shown(seconds and 1e3 * seconds, digits)


def _prefill(result: dict[str, Any]) -> Parts:
    """Return the times of prefill, which plans share if they can."""
    rows = {row["plan"]: (_prefill_key(row["plan"]), row["name"]) for row in result["rows"]}
    seconds: dict[tuple[Any, str], dict[tuple[Any, ...], float]] = defaultdict(dict)
    names: dict[str, dict[str, None]] = defaultdict(dict)  # an ordered set
    for sample in result["samples"]:
        if sample.get("read_s") is not None:
            key, name = rows[sample["plan"]]
            context = sample["task"], sample["seed"], sample["read_s"]
            seconds[sample["length"], key][context] = sample["read_s"]
            names[key][name] = None
    lines = [
        [f"{length:,} tokens" if length else "files", text_cell(", ".join(names[key])), len(own),
         shown(median(own.values()), 2)]
        for (length, key), own in sorted(seconds.items(), key=lambda item: item[0][0] or 0)
    ]  # fmt: skip
    if not lines:
        return []
    table = Table(["context", "plans that share it", "prefills", "median, s"], lines)
    return [Heading("Prefill of the contexts"), "A context is prefilled once for all plans that can share it.", table]


def _prefill_key(plan: str) -> str:
    try:
        return prefill_key(parse_plan(plan))
    except InputError:  # of a plug-in that is not installed here
        return plan


def memory(result: dict[str, Any], means: Sequence[PlanMean]) -> Parts:
    """Return a chart per length: a bar per plan, or per budget if budgets differ."""
    kept = [mean for mean in means if mean.kv_bytes]
    if not kept:
        return []
    note = "KV cache after an answer with the state of the method, median. The dashed line is dense."
    peaks = [sample["peak_memory_bytes"] for sample in result["samples"] if sample.get("peak_memory_bytes")]
    peak = f" Peak memory of a process: {max(peaks) / 2**30:.2f} GiB." if peaks else ""
    return [note + peak, *(_bars(at_length(means, length), length) for length in lengths_of(kept))]


def _bars(means: Sequence[PlanMean], length: int | None) -> Table:
    bars = [bar for name in dict.fromkeys(mean.name for mean in means) for bar in _bars_of(means, name)]
    most, dense = max(size for _, size, *_ in bars), dense_of(means, length)
    whole = dense.kv_bytes if dense else None
    line = f";--dense:{100 * whole / most:.1f}%" if whole else ""
    rows = [
        [label, text, percent(size, whole), Cell(kind="bar", mark=f"--mean:{100 * size / most:.1f}%{line}")]
        for label, size, text, _ in bars
    ]
    soft = [index for index, (*_, is_reference) in enumerate(bars) if is_reference]
    return Table(["plan", "KV cache, MiB", "of dense", ""], rows, f"{length:,} tokens" if length else "Files", soft)


def _bars_of(means: Sequence[PlanMean], name: str) -> list[tuple[str, float, str, bool]]:
    """Return one bar of a plan, or one per budget: name, bytes, MiB in words, whether it is a reference."""
    own = [(mean, mean.kv_bytes) for mean in means if mean.name == name and mean.kv_bytes is not None]
    sizes = [size for _, size in own]
    if not own or max(sizes) > (1 + ALIKE) * min(sizes):
        return [(mean.label, size, shown(size / MIB, 1), mean.is_reference) for mean, size in own]
    low, high = shown(min(sizes) / MIB, 1), shown(max(sizes) / MIB, 1)
    return [(name, max(sizes), low if low == high else f"{low} to {high}", own[0][0].is_reference)]
