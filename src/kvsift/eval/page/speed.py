"""Times and memory as they were met while asking: medians, to compare plans with each other."""

from __future__ import annotations

from typing import Any

from kvsift.eval.page.html import table
from kvsift.eval.page.quality import shown


def render(result: dict[str, Any]) -> str:
    """A table per length over all tasks."""
    timed = [sample for sample in result["samples"] if sample.get("ttft_s") is not None]
    if not timed:
        return ""
    together = max((session["workers"] for session in result["sessions"]), default=1)
    note = "Medians of single answers"
    note += f"; {together} contexts were worked on at a time, which slows each." if together > 1 else "."
    parts = [f"<p class=soft>{note} The first token of an answer is counted from the cached context.</p>"]
    lengths = sorted({sample["length"] for sample in timed}, key=lambda length: length or 0)
    return "".join(parts + [_table(result, [s for s in timed if s["length"] == each], each) for each in lengths])


def _table(result: dict[str, Any], samples: list[dict[str, Any]], length: int | None) -> str:
    head = ["plan", "budget", "context read, s", "first token, ms", "per token, ms", "KV held, MiB", "answers"]
    rows: list[list[Any]] = []
    soft: list[int] = []
    for row in result["rows"]:
        own = [sample for sample in samples if sample["plan"] == row["plan"]]
        if not own:
            continue
        soft += [len(rows)] if row["role"] != "plan" else []
        rows.append(
            [row["name"], row["budget"] or "-", shown(_median(own, "read_s"), 2), shown(_median(own, "ttft_s", 1e3), 1),
             shown(_median(own, "tpot_s", 1e3), 2), shown(_median(own, "kv_bytes", 2**-20), 1), len(own)]
        )  # fmt: skip
    peak = max(sample["peak_memory_bytes"] for sample in samples) / 2**30
    where = f"{length:,} tokens" if length else "Files"
    return table(head, rows, f"{where}; peak memory of a process {peak:.2f} GiB", soft)


def _median(samples: list[dict[str, Any]], key: str, unit: float = 1.0) -> float | None:
    values = sorted(sample[key] for sample in samples if sample.get(key) is not None)
    if not values:
        return None
    middle = len(values) // 2
    return unit * (values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2)
