"""TTFT, TPOT and prefill times of the evaluation, for comparisons between plans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from kvsift.engine.prefill_sharing import prefill_key
from kvsift.errors import InputError
from kvsift.plan.syntax import parse_plan
from kvsift_lab.eval.page.html import percent, shown, table, text_cell
from kvsift_lab.eval.page.means import PlanMean, dense_of

STEPS = {"captured": "CUDA graph", "": "-"}


def render(result: dict[str, Any], means: Sequence[PlanMean]) -> str:
    """Return a table per length over all tasks, and the times of prefill."""
    timed = [mean for mean in means if mean.ttft_s is not None]
    if not timed:
        return ""
    lengths = list(dict.fromkeys(mean.length for mean in timed))
    note = "Medians of single answers, with quartiles. TTFT counts from the cached context."
    tables = [_table([mean for mean in timed if mean.length == length], length) for length in lengths]
    return f"<p class=soft>{note} {at_a_time(result)}</p>" + "".join(tables) + _prefill(result)


def at_a_time(result: dict[str, Any]) -> str:
    """Return a warning if workers slowed each other."""
    together = max((session["workers"] for session in result["sessions"]), default=1)
    return f"{together} contexts ran at a time, which slows each." if together > 1 else ""


def _table(means: Sequence[PlanMean], length: int | None) -> str:
    head = ["plan", "TTFT, ms", "TPOT, ms", "quartiles", "of dense", "decode step", "answers"]
    dense = dense_of(means, length)
    whole = dense.tpot_s[1] if dense and dense.tpot_s else None
    rows = []
    for mean in means:
        low, middle, high = mean.tpot_s or (None, None, None)
        spread = "-" if low is None else f"{_ms(low, 2)} to {_ms(high, 2)}"
        rows.append(
            [mean.label, _ms(mean.ttft_s, 1), _ms(middle, 2), spread, percent(middle, whole),
             STEPS.get(mean.path, "eager"), mean.num_answers]
        )  # fmt: skip
    soft = [index for index, mean in enumerate(means) if mean.is_reference]
    return table(head, rows, f"{length:,} tokens" if length else "Files", soft)


def _ms(seconds: float | None, digits: int) -> str:
    return shown(seconds and 1e3 * seconds, digits)


def _prefill(result: dict[str, Any]) -> str:
    """Return the times of prefill, which plans share if they can."""
    rows = {row["plan"]: (_prefill_key(row["plan"]), row["name"]) for row in result["rows"]}
    times: dict[tuple[Any, str], dict[tuple[Any, ...], float]] = defaultdict(dict)
    names: dict[str, dict[str, None]] = defaultdict(dict)  # an ordered set
    for sample in result["samples"]:
        if sample.get("read_s") is not None:
            key, name = rows[sample["plan"]]
            context = sample["task"], sample["seed"], sample["read_s"]
            times[sample["length"], key][context] = sample["read_s"]
            names[key][name] = None
    lines = [
        [f"{length:,} tokens" if length else "files", text_cell(", ".join(names[key])), len(own),
         shown(median(own.values()), 2)]
        for (length, key), own in sorted(times.items(), key=lambda item: item[0][0] or 0)
    ]  # fmt: skip
    note = "A context is prefilled once for all plans that can share it."
    head = ["context", "plans that share it", "prefills", "median, s"]
    return f"<h3>Prefill of the contexts</h3><p class=soft>{note}</p>{table(head, lines)}" if lines else ""


def _prefill_key(plan: str) -> str:
    try:
        return prefill_key(parse_plan(plan))
    except InputError:  # of a plug-in that is not installed here
        return plan
