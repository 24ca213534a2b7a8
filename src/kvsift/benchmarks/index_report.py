"""Results of kvsift bench index as text. Numbers are rendered, never typed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from statistics import median
from typing import Any

from kvsift.benchmarks.host_timing import conditions, middle
from kvsift.benchmarks.numbers import table, tokens

BASELINE = "faiss_flat"
CHOICES = ("flat", "flat_int8", "graph")  # what auto chooses from
COLUMNS = (
    "index", "ms", f"over {BASELINE}", "of floor", "scanned", "recall", "mass", "set to", "build s", "KNN s", "B/key"
)  # fmt: skip


def point_text(point: dict[str, Any], known: Collection[str] = ()) -> str:
    """A heading and a table: a row per index; then why others were not measured, but for ``known`` reasons."""
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
    """Why indexes were not measured -> their names."""
    found: dict[str, list[str]] = defaultdict(list)
    for each in point["indexes"]:
        if "reason" in each:
            found[each["reason"]].append(each["name"])
    return found


def point_table(point: dict[str, Any]) -> str:
    """A Markdown table of the indexes that were measured."""
    times = search_times(point)
    rows = []
    for each in point["indexes"]:
        name = each["name"]
        if name not in times:
            continue
        floor = "" if each["num_bytes"] is None else f"{each['num_bytes'] / _bandwidth(point) / times[name]:.0%}"
        statistics = each["statistics"]
        over = f"{times[BASELINE] / times[name]:.1f}x" if BASELINE in times else ""
        rows.append(
            [
                name, f"{times[name] * 1e3:.2f}", over, floor, f"{each['scanned']:.2%}",
                f"{each['recall']:.3f}", f"{each['mass_recall']:.3f}", _setting(each),
                f"{statistics['build_seconds']:.1f}", _seconds(statistics.get("knn_seconds")),
                f"{each['bytes_per_key']:.0f}",
            ]
        )  # fmt: skip
    return table(COLUMNS, rows)


def search_times(point: dict[str, Any]) -> dict[str, float]:
    """Seconds of one search of all heads, by index; the median over quiet rounds."""
    return {e["name"]: middle(e["samples_s"], point["others"]) for e in point["indexes"] if "samples_s" in e}


def auto_ratio(point: dict[str, Any]) -> float | None:
    """Time of ``auto`` over that of the fastest it could have chosen; None if either was not measured."""
    times = search_times(point)
    alone = [times[name] for name in CHOICES if name in times]
    return times["auto"] / min(alone) if "auto" in times and alone else None


def medians(points: Sequence[dict[str, Any]]) -> str:
    """A Markdown table over several cases of one kind and k: medians of what each index scans and finds."""
    rows = []
    for k in sorted({point["k"] for point in points}):
        of_k = [point for point in points if point["k"] == k]
        for name in dict.fromkeys(each["name"] for point in of_k for each in point["indexes"] if "recall" in each):
            found = [e for point in of_k for e in point["indexes"] if e["name"] == name and "recall" in e]
            missed = sum(not each.get("reached", True) for each in found)
            cells = [f"{median(each[key] for each in found):{spec}}" for key, spec in FIGURES.items()]
            rows.append([str(k), name, str(len(found)), *cells, str(missed or "")])
    return table(("k", "index", "cases", "scanned", "recall", "mass", "worst head's mass", "missed"), rows)


FIGURES = {"scanned": ".2%", "recall": ".3f", "mass_recall": ".3f", "worst_mass_recall": ".3f"}


def _bandwidth(point: dict[str, Any]) -> float:
    return middle(point["bandwidth"], point["others"])


def _setting(each: dict[str, Any]) -> str:
    if "knob" not in each:
        kinds = each["statistics"].get("heads", [])
        return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    return f"{each['knob']} {each['value']}{'' if each['reached'] else ', missed'}"


def _seconds(number: float | None) -> str:
    return "" if number is None else f"{number:.1f}"
