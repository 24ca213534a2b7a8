"""Results of kvsift bench index as text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from statistics import median
from typing import Any

from kvsift_lab.bench.host_timing import conditions, middle
from kvsift_lab.bench.numbers import table, tokens

BASELINE = "faiss_flat"
CHOICES = ("flat", "flat_int8", "graph")  # of auto
COLUMNS = (
    "index", "ms", f"over {BASELINE}", "of floor", "scanned", "recall", "mass", "set to", "build s", "KNN s", "B/key"
)  # fmt: skip


def point_text(point: dict[str, Any], known: Collection[str] = ()) -> str:
    """Render a heading, a table with a row per index, and reasons of missing indexes that are not ``known``."""
    heads = "/".join(map(str, point["heads"]))
    lines = [
        f"{point['case']}, {tokens(point['keys'])} keys, heads {heads}, top {point['k']} hold "
        f"{point['top_mass']:.2f} of the mass; {conditions(point['bandwidth'], point['others'])}",
        point_table(point),
    ]
    if (ratio := auto_ratio(point)) is not None:
        lines.append(f"auto takes {ratio:.2f} of the time of the better of graph and scan")
    lines += [f"{', '.join(names)}: {reason}" for reason, names in reasons(point).items() if reason not in known]
    return "\n".join(lines) + "\n"


def reasons(point: dict[str, Any]) -> dict[str, list[str]]:
    """Return the names of indexes that were not measured, by reason."""
    names: dict[str, list[str]] = defaultdict(list)
    for row in point["indexes"]:
        if "reason" in row:
            names[row["reason"]].append(row["name"])
    return names


def point_table(point: dict[str, Any]) -> str:
    """Return a Markdown table of the measured indexes."""
    times = search_times(point)
    rows = []
    for row in point["indexes"]:
        name = row["name"]
        if name not in times:
            continue
        floor = "" if row["num_bytes"] is None else f"{row['num_bytes'] / _bandwidth(point) / times[name]:.0%}"
        statistics = row["statistics"]
        over = f"{times[BASELINE] / times[name]:.1f}x" if BASELINE in times else ""
        rows.append(
            [
                name, f"{times[name] * 1e3:.2f}", over, floor, f"{row['scanned']:.2%}",
                f"{row['recall']:.3f}", f"{row['mass_recall']:.3f}", _setting(row),
                f"{statistics['build_seconds']:.1f}", _seconds(statistics.get("knn_seconds")),
                f"{row['bytes_per_key']:.0f}",
            ]
        )  # fmt: skip
    return table(COLUMNS, rows)


def search_times(point: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of one search of all heads by index, medians over quiet rounds."""
    return {e["name"]: middle(e["samples_s"], point["others"]) for e in point["indexes"] if "samples_s" in e}


def auto_ratio(point: dict[str, Any]) -> float | None:
    """Return the time of ``auto`` over that of its fastest choice; None if either was not measured."""
    times = search_times(point)
    alone = [times[name] for name in CHOICES if name in times]
    return times["auto"] / min(alone) if "auto" in times and alone else None


def medians(points: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table over several cases: medians of the figures of each index, by k."""
    rows = []
    for k in sorted({point["k"] for point in points}):
        measured = [row for point in points if point["k"] == k for row in point["indexes"] if "recall" in row]
        for name in dict.fromkeys(row["name"] for row in measured):
            cases = [row for row in measured if row["name"] == name]
            missed = sum(not row.get("reached", True) for row in cases)
            cells = [f"{median(row[key] for row in cases):{spec}}" for key, spec in FIGURES.items()]
            rows.append([str(k), name, str(len(cases)), *cells, str(missed or "")])
    return table(("k", "index", "cases", "scanned", "recall", "mass", "worst head's mass", "missed"), rows)


FIGURES = {"scanned": ".2%", "recall": ".3f", "mass_recall": ".3f", "worst_mass_recall": ".3f"}


def _bandwidth(point: dict[str, Any]) -> float:
    return middle(point["bandwidth"], point["others"])


def _setting(row: dict[str, Any]) -> str:
    if "knob" not in row:
        kinds = row["statistics"].get("heads", [])
        return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    return f"{row['knob']} {row['value']}{'' if row['reached'] else ', missed'}"


def _seconds(number: float | None) -> str:
    return "" if number is None else f"{number:.1f}"
