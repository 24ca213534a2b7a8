"""Decode results as Markdown tables, as text for a terminal, and as one line of JSON."""

from __future__ import annotations

from statistics import median
from typing import Any

from kvsift_lab.bench.numbers import spread, table, tokens

LABELS = {"dense": "dense", "sifted": "sparse", "auto": "auto"}  # of variants, by their names in results
LEAST_SHARE = 0.01  # of a step: kernels below it are summed up


def tpot_s(point: dict[str, Any], name: str) -> float | None:
    """Return the median seconds per token of a variant; None if it was not measured."""
    measured = variant(point, name)
    return None if measured is None else float(median(measured["tpot_s"]))


def variant(point: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return a variant by its name."""
    return next((variant for variant in point.get("variants", []) if variant["name"] == name), None)


def decode_table(result: dict[str, Any]) -> str:
    """Return a Markdown table: a row per point; milliseconds per token, over the floor, and how many times faster."""
    bandwidth = result["bandwidth"]["used"]
    rows = []
    for point in result["points"]:
        if "variants" not in point:
            continue
        dense, sifted = tpot_s(point, "dense"), tpot_s(point, "sifted")
        cells = [tokens(point["context"]), str(point["batch"])]
        for name, seconds in (("dense", dense), ("sifted", sifted)):
            measured = variant(point, name)
            floor = measured["bytes"] / bandwidth if measured else None
            cells += [_ms(seconds), _ms(floor), f"{seconds / floor:.2f}" if seconds and floor else "-"]
        cells.append(f"{dense / sifted:.2f}x" if dense and sifted else "-")
        cells.append(f"{variant(point, 'sifted')['density']:.3f}" if sifted else "-")  # type: ignore[index]
        rows.append(cells)
    columns = ["context", "batch", "dense", "floor", "times it", "sparse", "floor", "times it", "speed-up", "density"]
    return table(columns, rows)


def engine_table(result: dict[str, Any]) -> str:
    """Return a Markdown table: the context from which the engine decodes by the plan, and the cost of its choice."""
    rows = []
    for point in result["points"]:
        if "variants" not in point:
            continue
        dense, auto = tpot_s(point, "dense"), tpot_s(point, "auto")
        chosen = "dense" if auto is not None else "sifted"
        auto = tpot_s(point, "sifted") if auto is None else auto
        cost = f"{100 * (auto / dense - 1):+.1f} %" if dense and auto else "-"
        below = f"{point['dense_below']:,}"
        rows.append([tokens(point["context"]), str(point["batch"]), below, LABELS[chosen], cost])
    return table(["context", "batch", "sparse from", "decodes", "against the dense plan"], rows)


def kernel_tables(result: dict[str, Any]) -> str:
    """Return Markdown tables of the slowest kernels of a step; "" without a profile."""
    parts = []
    for point in result["points"]:
        for measured in point.get("variants", []):
            if measured.get("kernels") and measured["name"] != "auto":  # the same kernels as dense
                title = f"{tokens(point['context'])}, batch {point['batch']}, {LABELS[measured['name']]}:"
                parts.append(f"{title}\n\n{_kernel_table(measured['kernels'])}")
    return "\n\n".join(parts)


def _kernel_table(kernels: list[dict[str, Any]]) -> str:
    total = sum(kernel["seconds"] for kernel in kernels)
    slow = [kernel for kernel in kernels if kernel["seconds"] >= LEAST_SHARE * total]
    rest = [kernel for kernel in kernels if kernel not in slow]
    rows = [_kernel_row(f"`{k['name']}`", k["launches"], k["seconds"], total) for k in slow]
    if rest:
        launches, seconds = (sum(kernel[key] for kernel in rest) for key in ("launches", "seconds"))
        rows.append(_kernel_row(f"{len(rest)} below {LEAST_SHARE:.0%} each", launches, seconds, total))
    return table(["kernel", "launches", "us per step", "share"], rows)


def _kernel_row(name: str, launches: float, seconds: float, total: float) -> list[str]:
    return [name, f"{launches:.3g}", f"{seconds * 1e6:.0f}", f"{seconds / total:.0%}"]


def point_text(point: dict[str, Any], bandwidth: float) -> str:
    """Render all variants of a point, one per line."""
    title = f"{tokens(point['context'])} tokens, batch {point['batch']}"
    if "reason" in point:
        return f"{title}: not measured, {point['reason']}"
    lines = [f"{title}: the engine sifts from {point['dense_below']:,} tokens on, {point['seconds']} s"]
    lines.append(f"  {'':10}{'ms/token':>10}{'spread':>9}{'replayed':>10}{'floor':>9}{'of floor':>10}{'speed-up':>10}")
    dense = tpot_s(point, "dense") or float("nan")
    for measured in point["variants"]:
        seconds, floor = float(median(measured["tpot_s"])), measured["bytes"] / bandwidth
        replayed = _ms(median(measured["replay_s"]) if measured["replay_s"] else None)
        cells = f"{_ms(seconds):>10}{100 * spread(measured['tpot_s']):>7.1f} %{replayed:>10}{_ms(floor):>9}"
        lines.append(f"  {measured['name']:10}{cells}{seconds / floor:>10.2f}{dense / seconds:>9.2f}x")
    return "\n".join(lines)


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Return the result without samples, for the last line of the output."""
    bandwidth = result["bandwidth"]["used"]
    points = []
    for point in result["points"]:
        row = {key: value for key, value in point.items() if key in ("context", "batch", "dense_below", "reason")}
        for measured in point.get("variants", []):
            seconds = float(median(measured["tpot_s"]))
            floors = round(seconds * bandwidth / measured["bytes"], 3)
            row[measured["name"]] = {"tpot_ms": round(seconds * 1e3, 4), "of_floor": floors}
        points.append(row)
    return {"kind": result["kind"], "bandwidth": result["bandwidth"], "points": points}


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"
