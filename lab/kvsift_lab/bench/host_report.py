"""Results of kvsift bench host as text."""

from __future__ import annotations

from typing import Any

from kvsift_lab.bench.host_timing import conditions, middle
from kvsift_lab.bench.numbers import table, tokens

RATIOS = (  # (variant, variant that it is compared with)
    ("native dense", "torch bmm-softmax-bmm"),
    ("native dense", "torch sdpa, group as rows"),
    ("native dense", "torch sdpa, enable_gqa"),
    ("native pages per KV head", "native dense"),
    ("native pages per KV head", "torch pages per KV head"),
    ("native pages per query head", "native dense"),
    ("native sketch1 per KV head", "native dense"),
    ("native sketch2 per KV head", "native dense"),
    ("retrieval step", "native dense"),
)


def point_text(point: dict[str, Any]) -> str:
    """Render a heading, a row per variant, and ratios of their times."""
    lines = [
        f"{tokens(point['context'])} tokens; {conditions(point['bandwidth'], point['others'])}",
        point_table(point),
    ]
    if "index" in point:
        lines.append(index_line(point))
    lines += point["missing"]
    lines += [f"{name} is {factor:.1f}x as fast as {other}" for name, other, factor in ratios(point)]
    return "\n".join(lines) + "\n"


def point_table(point: dict[str, Any]) -> str:
    """Return a Markdown table: milliseconds, the floor that memory sets, and its share."""
    rows = []
    for name, seconds in times(point).items():
        floor = next(e["num_bytes"] for e in point["variants"] if e["name"] == name) / _bandwidth(point)
        rows.append([name, f"{seconds * 1e3:.3f}", f"{floor * 1e3:.3f}", f"{floor / seconds:.0%}"])
    return table(["", "ms", "floor", "of floor"], rows)


def times(point: dict[str, Any]) -> dict[str, float]:
    """Return the seconds by variant, medians over quiet rounds."""
    return {v["name"]: middle(v["samples_s"], point["others"]) for v in point["variants"]}


def ratios(point: dict[str, Any]) -> list[tuple[str, str, float]]:
    """Return how many times faster the first variant of each pair is."""
    seconds = times(point)
    return [(one, two, seconds[two] / seconds[one]) for one, two in RATIOS if one in seconds and two in seconds]


def index_line(point: dict[str, Any]) -> str:
    """Render the index of the retrieval step."""
    index = point["index"]
    text = f"index {index['kind']}, {index['scanned'] / point['context']:.2%} of the keys scanned"
    return f"{text}, built in {index['build_seconds']:.1f} s" + (f" ({index['why']})" if index.get("why") else "")


def _bandwidth(point: dict[str, Any]) -> float:
    return middle(point["bandwidth"], point["others"])
