"""kvsift bench index: search of all heads of one layer, index by index, at the same recall; recipe and report."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kvsift.errors import Conflict, InvalidValue
from kvsift_lab.bench import recipe as r
from kvsift_lab.bench.report import Point, conditions, middle
from kvsift_lab.numbers import grouped, table, tokens

DUMPED = "P"
DUMP = "File of kvsift bench dump; may be given more than once."
INDEXES = "flat,flat_int8,graph,graph_paper,auto,faiss_flat,ivf,hnsw"
BASELINE = "faiss_flat"
CHOICES = ("flat", "flat_int8", "graph")  # of auto
FIGURES = {"scanned": ".2%", "recall": ".3f", "mass_recall": ".3f", "worst_mass_recall": ".3f"}  # of medians


@dataclass(frozen=True)
class IndexRecipe(r.BenchRecipe):
    """Search of one decode step in one layer: every index at the same recall, in turns, with cold caches."""

    measured_by = "kvsift_lab.bench.index_measure:IndexBench"

    data: tuple[str, ...] = r.option("S,T", "Sets: S peaky, T diffuse, R noise, P of --dump.", parse=r.names)
    contexts: tuple[int, ...] = r.contexts("32K,128K")
    ks: tuple[int, ...] = r.option("100,2000", "Keys to find.", flag="--k", parse=r.token_counts)
    num_query_heads: int = r.heads()
    num_kv_heads: int = 8
    head_dim: int = r.head_dim()
    indexes: tuple[str, ...] = r.option(INDEXES, "Names; graph_causal is another.", parse=r.names)
    dumps: tuple[str, ...] = r.option(
        None, DUMP, flag="--dump", kind=list[Path] | None, value=(), parse=lambda paths, flag: tuple(map(str, paths))
    )
    each_head: bool = r.option(False, "Measure and tune every KV head alone.")
    samples: int = r.samples()
    tokens: int = r.option(32, "Decode steps, half to tune, half to measure.", minimum=2)
    target: float = r.option(0.95, "Recall that indexes are tuned for.")
    seed: int = r.option(0, "Of the synthetic sets.")
    threads: int | None = r.threads()
    repeats: int = r.repeats(20)
    sinks: int = 128  # of a document's tokens: always visible and in no index, as the window is (arXiv 2409.10516)
    window: int = 512
    cold_bytes: int = r.COLD_BYTES

    def __post_init__(self) -> None:
        from kvsift_lab.bench.index_cases import CONTENDERS
        from kvsift_lab.bench.index_data import SYNTHETIC

        r.require_known("data set", self.data, (*SYNTHETIC, DUMPED))
        r.require_known("index", self.indexes, CONTENDERS)
        r.require_some(self.data, self.indexes, self.ks, names="data set, index and k")
        r.require_some(self.contexts or not set(self.data) & set(SYNTHETIC), names="context")
        if (DUMPED in self.data) != bool(self.dumps):
            raise Conflict(
                "data set P and a dump belong together: kvsift bench dump --out FILE makes one, and --dump FILE "
                "reads it."
            )
        r.check_groups(self.num_query_heads, self.num_kv_heads)
        if not 0 < self.target <= 1:
            raise InvalidValue(f"--target {self.target:g} must be a recall above 0, and 1 at most.")


def point_text(point: Point, known: Collection[str] = ()) -> str:
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


def reasons(point: Point) -> dict[str, list[str]]:
    """Return the names of indexes that were not measured, by reason."""
    missing = [row for row in point["indexes"] if "reason" in row]
    return {reason: [row["name"] for row in rows] for reason, rows in grouped(missing, "reason").items()}


def point_table(point: Point) -> str:
    """Return a Markdown table of the measured indexes."""
    times, rows = search_times(point), []
    for row in (row for row in point["indexes"] if row["name"] in times):
        seconds, statistics, knn_s = times[row["name"]], row["statistics"], row["statistics"].get("knn_seconds")
        floor = None if row["num_bytes"] is None else row["num_bytes"] / middle(point["bandwidth"], point["others"])
        cells = {
            "index": row["name"],
            "ms": f"{seconds * 1e3:.2f}",
            f"over {BASELINE}": f"{times[BASELINE] / seconds:.1f}x" if BASELINE in times else "",
            "of floor": "" if floor is None else f"{floor / seconds:.0%}",
            "scanned": f"{row['scanned']:.2%}",
            "recall": f"{row['recall']:.3f}",
            "mass": f"{row['mass_recall']:.3f}",
            "set to": _setting(row),
            "build s": f"{statistics['build_seconds']:.1f}",
            "KNN s": "" if knn_s is None else f"{knn_s:.1f}",
            "B/key": f"{row['bytes_per_key']:.0f}",
        }
        rows.append(cells)
    return table(list(rows[0]), [list(cells.values()) for cells in rows])


def search_times(point: Point) -> dict[str, float]:
    """Return the seconds of one search of all heads by index, medians over quiet rounds."""
    return {e["name"]: middle(e["samples_s"], point["others"]) for e in point["indexes"] if "samples_s" in e}


def auto_ratio(point: Point) -> float | None:
    """Return the time of ``auto`` over that of its fastest choice; None if either was not measured."""
    times = search_times(point)
    alone = [times[name] for name in CHOICES if name in times]
    return times["auto"] / min(alone) if "auto" in times and alone else None


def medians(points: Sequence[Point]) -> str:
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


def _setting(row: dict[str, Any]) -> str:
    if "knob" not in row:
        kinds = row["statistics"].get("heads", [])
        return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    return f"{row['knob']} {row['value']}{'' if row['reached'] else ', missed'}"
