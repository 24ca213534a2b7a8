"""Decode results as tables and text. Numbers are rendered, never typed."""

from __future__ import annotations

from statistics import median
from typing import Any

from kvsift.benchmarks.numbers import spread, table, tokens

KERNELS_SHOWN = 12


def tpot_s(point: dict[str, Any], name: str) -> float | None:
    """Median seconds per token of a variant; None if it was not measured."""
    found = variant(point, name)
    return None if found is None else float(median(found["tpot_s"]))


def variant(point: dict[str, Any], name: str) -> dict[str, Any] | None:
    """By its name."""
    return next((each for each in point.get("variants", []) if each["name"] == name), None)


def decode_table(result: dict[str, Any]) -> str:
    """A Markdown table: a row per point; milliseconds per token, over the floor, and how many times faster."""
    bandwidth = result["bandwidth"]["used"]
    rows = []
    for point in result["points"]:
        if "variants" not in point:
            continue
        dense, sifted = tpot_s(point, "dense"), tpot_s(point, "sifted")
        cells = [tokens(point["context"]), str(point["batch"])]
        for name, seconds in (("dense", dense), ("sifted", sifted)):
            found = variant(point, name)
            floor = found["bytes"] / bandwidth if found else None
            cells += [_ms(seconds), _ms(floor), f"{seconds / floor:.2f}" if seconds and floor else "-"]
        cells.append(f"{dense / sifted:.2f}x" if dense and sifted else "-")
        cells.append(f"{variant(point, 'sifted')['density']:.3f}" if sifted else "-")  # type: ignore[index]
        rows.append(cells)
    columns = ["context", "batch", "dense", "floor", "times it", "sifted", "floor", "times it", "speed-up", "density"]
    return table(columns, rows)


def engine_table(result: dict[str, Any]) -> str:
    """A Markdown table: below which context the engine shows everything by itself, and what that costs there."""
    rows = []
    for point in result["points"]:
        if "variants" not in point:
            continue
        dense, auto = tpot_s(point, "dense"), tpot_s(point, "auto")
        chosen = "dense" if auto is not None else "sifted"
        auto = tpot_s(point, "sifted") if auto is None else auto
        cost = f"{100 * (auto / dense - 1):+.1f} %" if dense and auto else "-"
        below = f"{point['dense_below']:,}"
        rows.append([tokens(point["context"]), str(point["batch"]), below, chosen, cost])
    return table(["context", "batch", "sifts from", "so it decodes", "against the dense plan"], rows)


def kernel_tables(result: dict[str, Any]) -> str:
    """Markdown tables of the slowest kernels of a step, where they were profiled; "" if nowhere."""
    parts = []
    for point in result["points"]:
        for each in point.get("variants", []):
            kernels = each.get("kernels", [])
            if kernels and each["name"] != "auto":  # which runs the same as dense
                total = sum(kernel["seconds"] for kernel in kernels)
                rows = [
                    [f"`{k['name']}`", f"{k['launches']:g}", f"{k['seconds'] * 1e6:.0f}", f"{k['seconds'] / total:.0%}"]
                    for k in kernels[:KERNELS_SHOWN]
                ]
                title = f"{tokens(point['context'])}, batch {point['batch']}, {each['name']}:"
                parts.append(f"{title}\n\n{table(['kernel', 'launches', 'us per step', 'share'], rows)}")
    return "\n\n".join(parts)


def point_text(point: dict[str, Any], bandwidth: float) -> str:
    """All variants of a point, one per line."""
    title = f"{tokens(point['context'])} tokens, batch {point['batch']}"
    if "reason" in point:
        return f"{title}: not measured, {point['reason']}"
    lines = [f"{title}: the engine sifts from {point['dense_below']:,} tokens on, {point['seconds']} s"]
    lines.append(f"  {'':10}{'ms/token':>10}{'spread':>9}{'replayed':>10}{'floor':>9}{'of floor':>10}{'speed-up':>10}")
    dense = tpot_s(point, "dense") or float("nan")
    for each in point["variants"]:
        seconds, floor = float(median(each["tpot_s"])), each["bytes"] / bandwidth
        replayed = _ms(median(each["replay_s"]) if each["replay_s"] else None)
        cells = f"{_ms(seconds):>10}{100 * spread(each['tpot_s']):>7.1f} %{replayed:>10}{_ms(floor):>9}"
        lines.append(f"  {each['name']:10}{cells}{seconds / floor:>10.2f}{dense / seconds:>9.2f}x")
    return "\n".join(lines)


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """The result without its samples, for the last line of the output."""
    bandwidth = result["bandwidth"]["used"]
    points = []
    for point in result["points"]:
        found = {key: value for key, value in point.items() if key in ("context", "batch", "dense_below", "reason")}
        for each in point.get("variants", []):
            seconds = float(median(each["tpot_s"]))
            of_floor = round(seconds * bandwidth / each["bytes"], 3)
            found[each["name"]] = {"tpot_ms": round(seconds * 1e3, 4), "of_floor": of_floor}
        points.append(found)
    return {"kind": result["kind"], "bandwidth": result["bandwidth"], "points": points}


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"
