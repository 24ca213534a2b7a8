"""Results of kvsift bench host as text. Numbers are rendered, never typed."""

from __future__ import annotations

from typing import Any

from kvsift.benchmarks.host_timing import conditions, middle
from kvsift.benchmarks.numbers import table, tokens

RATIOS = (  # what is said to be faster, and than what
    ("native dense", "torch bmm-softmax-bmm"),
    ("native dense", "torch sdpa, group as rows"),
    ("native dense", "torch sdpa, enable_gqa"),
    ("native pages per KV head", "native dense"),
    ("native pages per KV head", "torch pages per KV head"),
    ("native pages per query head", "native dense"),
    ("retrieval step", "native dense"),
)


def point_text(point: dict[str, Any]) -> str:
    """A heading, a row per variant, and what follows from them."""
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
    """A Markdown table: milliseconds, the floor that memory sets, and how near to it."""
    rows = []
    for name, seconds in times(point).items():
        floor = next(e["num_bytes"] for e in point["variants"] if e["name"] == name) / _bandwidth(point)
        rows.append([name, f"{seconds * 1e3:.3f}", f"{floor * 1e3:.3f}", f"{floor / seconds:.0%}"])
    return table(["", "ms", "floor", "of floor"], rows)


def times(point: dict[str, Any]) -> dict[str, float]:
    """Seconds by variant, the median over quiet rounds."""
    return {each["name"]: middle(each["samples_s"], point["others"]) for each in point["variants"]}


def ratios(point: dict[str, Any]) -> list[tuple[str, str, float]]:
    """Who is how much faster than whom."""
    found = times(point)
    return [(name, other, found[other] / found[name]) for name, other in RATIOS if name in found and other in found]


def index_line(point: dict[str, Any]) -> str:
    """What the retrieval step searched."""
    index = point["index"]
    text = f"index {index['kind']}, {index['scanned'] / point['context']:.2%} of the keys scanned"
    return f"{text}, built in {index['build_seconds']:.1f} s" + (f" ({index['why']})" if index.get("why") else "")


def _bandwidth(point: dict[str, Any]) -> float:
    return middle(point["bandwidth"], point["others"])
