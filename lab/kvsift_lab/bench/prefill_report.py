"""Prefill results as Markdown tables, and as text for a terminal."""

from __future__ import annotations

from statistics import median
from typing import Any

from kvsift_lab.bench.numbers import spread, table, tokens

CEILING = "no attention"


def ttft_table(result: dict[str, Any]) -> str:
    """Return a Markdown table: a row per context; time to first token, and speed-up over the best dense variant."""
    plans = result["recipe"]["plans"]
    rows = []
    for point in result["points"]:
        if "variants" not in point:
            continue
        times = {v["name"]: float(median(v["ttft_s"])) for v in point["variants"]}
        dense = min(seconds for name, seconds in times.items() if name.startswith("dense"))
        best = next(name for name, seconds in times.items() if seconds == dense).removeprefix("dense, ")
        cells = [tokens(point["context"]), f"{dense:.3f}", best]
        for plan in plans:
            cells += [f"{times[plan]:.3f}", f"{dense / times[plan]:.2f}x"]
        rows.append([*cells, f"{dense / times[CEILING]:.2f}x"])
    titles = [title for plan in plans for title in (f"`{plan.removeprefix('prefill=')}`", "faster")]
    return table(["context", "dense", "in", *titles, "ceiling"], rows)


def layer_table(result: dict[str, Any]) -> str:
    """Return a Markdown table: a row per context and variant; milliseconds in one layer, and speed-up over the best
    dense variant."""
    rows = []
    for point in result["points"]:
        times = _layer_times(point)
        plans = [name for name in times if name in result["recipe"]["plans"]]
        dense = {name: seconds for name, seconds in times.items() if name not in plans}
        best = min(dense, key=dense.__getitem__)
        for name, seconds in times.items():
            label = f"`{name.removeprefix('prefill=')}`" if name in plans else name
            rate = f"{point['flops'] / seconds / 1e12:.1f}" if name in dense else ""
            faster = f"{dense[best] / seconds:.2f}x"
            rows.append([tokens(point["context"]), label, f"{seconds * 1e3:.2f}", rate, faster])
    return table(["context", "", "ms", "TFLOP/s", "over the best dense"], rows)


def point_text(point: dict[str, Any]) -> str:
    """Render all variants of a context, one per line: median, and interquartile range as a share of it."""
    if "reason" in point:
        return f"{tokens(point['context'])} tokens: not measured, {point['reason']}"
    lines = [f"{tokens(point['context'])} tokens"]
    for variant in point["variants"]:
        if "reason" in variant:
            lines.append(f"  {variant['name']}: {variant['reason']}")
            continue
        samples = variant.get("ttft_s") or variant["samples_s"]
        density = f", density {variant['density']:.1%}" if "density" in variant else ""
        spread_text = f"spread {100 * spread(samples):.1f} %" if len(samples) > 1 else "1 sample"
        lines.append(f"  {median(samples) * 1e3:10.2f} ms ({spread_text}) {variant['name']}{density}")
    return "\n".join(lines)


def _layer_times(point: dict[str, Any]) -> dict[str, float]:
    return {v["name"]: float(median(v["samples_s"])) for v in point["variants"] if "samples_s" in v}
