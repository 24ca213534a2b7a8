"""An attention result as a terminal shows it, and as one line of JSON."""

from __future__ import annotations

from math import isfinite
from statistics import median
from typing import Any

from kvsift.benchmarks.attention_report import best_dense, break_even_text, break_evens, left_out, medians
from kvsift.benchmarks.numbers import spread, tokens


def point_text(point: dict[str, Any], bandwidth: float) -> str:
    """All variants of a point, one per line."""
    heads = f"{point['num_query_heads']}/{point['num_kv_heads']} heads"
    title = f"{heads}, {tokens(point['context'])} tokens, batch {point['batch']}"
    if "reason" in point:
        return f"{title}: not measured, {point['reason']}"
    name, dense = best_dense(point)
    lines = [f"{title}: {point['num_sets']} sets of buffers, {point['seconds']} s"]
    lines.append(f"  {'':35}{'us':>9}{'spread':>8}{'floor':>9}{'of floor':>10}{'speed-up':>10}{'error':>9}  pages")
    for each in [*point["variants"], *point["breakdown"]]:
        lines.append(f"  {_line(each, bandwidth, dense)}")
    return "\n".join([*lines, f"  best dense: {name or 'none ran'}"])


def _line(variant: dict[str, Any], bandwidth: float, dense: float) -> str:
    name = f"{variant['score_by']} {variant['name']}" if "score_by" in variant else variant["name"]
    if "samples_s" not in variant:
        return f"{name:35}not measured: {variant['reason']}"
    seconds, floor = median(variant["samples_s"]), variant["bytes"] / bandwidth
    cells = f"{seconds * 1e6:>9.2f}{100 * spread(variant['samples_s']):>6.1f} %{floor * 1e6:>9.2f}"
    cells += f"{seconds / floor:>10.2f}" if floor else f"{'-':>10}"
    cells += f"{dense / seconds:>9.2f}x" if "role" in variant and isfinite(dense) else f"{'':10}"
    cells += f"{variant['error']:>9.1e}" if "error" in variant else ""
    return f"{name:35}{cells}" + (f"  {variant['same_pages']:.4f}" if "same_pages" in variant else "")


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """The result without its samples, for the last line of the output."""
    points = [
        {
            "heads": f"{point['num_query_heads']}/{point['num_kv_heads']}",
            "context": point["context"],
            "best_dense": best_dense(point)[0],
            "us": {name: round(seconds * 1e6, 2) for name, seconds in medians(point).items()},
            "speed_up": {
                name: round(best_dense(point)[1] / seconds, 2)
                for name, seconds in medians(point, "sparse").items()
                if best_dense(point)[0]
            },
        }
        for point in result["points"]
        if medians(point)
    ]
    return {
        "kind": result["kind"],
        "bandwidth": result["bandwidth"],
        "points": points,
        "break_even": break_evens(result),
        "left_out": left_out(result),
    }


def break_even_lines(result: dict[str, Any]) -> str:
    """One line per shape, variant and rival."""
    return "\n".join(
        f"{found['num_query_heads']}/{found['num_kv_heads']} heads: {found['variant']} is faster than {found['than']} "
        f"from {break_even_text(found)} tokens on"
        for found in break_evens(result)
    )
