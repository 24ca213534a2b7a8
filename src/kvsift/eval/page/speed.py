"""Times as they were met while asking, to compare plans with each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from kvsift.errors import InputError
from kvsift.eval.page.html import percent, shown, table, text_cell
from kvsift.eval.page.means import Mean, dense_of
from kvsift.eval.rows import way_of_reading

STEPS = {"captured": "CUDA graph", "": "-"}


def render(result: dict[str, Any], means: Sequence[Mean]) -> str:
    """A table per length over all tasks, and what prefilling the contexts took."""
    timed = [each for each in means if each.ttft_s is not None]
    if not timed:
        return ""
    lengths = list(dict.fromkeys(each.length for each in timed))
    note = "Medians of single answers, with quartiles. TTFT counts from the cached context."
    tables = [_table([each for each in timed if each.length == length], length) for length in lengths]
    return f"<p class=soft>{note} {at_a_time(result)}</p>" + "".join(tables) + _prefill(result)


def at_a_time(result: dict[str, Any]) -> str:
    """A warning if answers slowed one another."""
    together = max((session["workers"] for session in result["sessions"]), default=1)
    return f"{together} contexts were worked on at a time, which slows each." if together > 1 else ""


def _table(means: Sequence[Mean], length: int | None) -> str:
    head = ["plan", "TTFT, ms", "TPOT, ms", "quartiles", "of dense", "decode step", "answers"]
    dense = dense_of(means, length)
    whole = dense.tpot_s[1] if dense and dense.tpot_s else None
    rows = []
    for each in means:
        low, middle, high = each.tpot_s or (None, None, None)
        spread = "-" if low is None else f"{_ms(low, 2)} to {_ms(high, 2)}"
        rows.append(
            [each.label, _ms(each.ttft_s, 1), _ms(middle, 2), spread, percent(middle, whole),
             STEPS.get(each.path, "eager"), each.num_answers]
        )  # fmt: skip
    soft = [index for index, each in enumerate(means) if each.is_reference]
    return table(head, rows, f"{length:,} tokens" if length else "Files", soft)


def _ms(seconds: float | None, digits: int) -> str:
    return shown(seconds and 1e3 * seconds, digits)


def _prefill(result: dict[str, Any]) -> str:
    """What prefilling took: once per context for all plans that can share it, so no number of a single plan."""
    rows = {row["plan"]: (_way(row["plan"]), row["name"]) for row in result["rows"]}
    taken: dict[tuple[Any, str], dict[tuple[Any, ...], float]] = defaultdict(dict)
    names: dict[str, dict[str, None]] = defaultdict(dict)  # an ordered set
    for sample in result["samples"]:
        if sample.get("read_s") is not None:
            way, name = rows[sample["plan"]]
            context = sample["task"], sample["seed"], sample["read_s"]
            taken[sample["length"], way][context] = sample["read_s"]
            names[way][name] = None
    lines = [
        [f"{length:,} tokens" if length else "files", text_cell(", ".join(names[way])), len(times),
         shown(median(times.values()), 2)]
        for (length, way), times in sorted(taken.items(), key=lambda item: item[0][0] or 0)
    ]  # fmt: skip
    note = "A context is prefilled once for all plans that can share it; then they are asked."
    head = ["context", "plans that share it", "prefills", "median, s"]
    return f"<h3>Prefill of the contexts</h3><p class=soft>{note}</p>{table(head, lines)}" if lines else ""


def _way(plan: str) -> str:
    try:
        return way_of_reading(plan)
    except InputError:  # a plug-in's that is not installed here
        return plan
