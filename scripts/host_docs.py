"""What docs/host.md shows of measurements, as the benchmarks themselves print them."""

from __future__ import annotations

import json
from collections.abc import Callable
from statistics import median
from typing import Any

import busy_machine
from paper_docs import RESULTS, result_of
from speed_docs import measured_on, place, shown

from kvsift.benchmarks import host_report, index_report
from kvsift.eval.tables import quality_table

HOST = "host-cpu.json"
SPLIT = ("split-h200.json", "split-512k-h200.json", "split-1m-h200.json")
ANSWERS = ("retrieval-32k", "retrieval-host-32k")
WRITTEN = "generation-recall-cpu.json"
BUSY = "busy-machine*.json"
INDEX = ("index-st-cpu.json", "index-p-cpu.json")


def points(text: Callable[[dict[str, Any]], str]) -> Callable[[dict[str, Any]], str]:
    """Every point of a result."""
    return lambda result: "\n\n".join(text(point).strip() for point in result["points"])


def split_table(result: dict[str, Any]) -> str:
    """Milliseconds per token by context and index."""
    layers = result["recipe"].get("layers")
    context = f"context, {layers} layers" if layers else "context"
    lines = [f"| {context} | index | ms per token | of it, host | KV on the device |", "|---|---|---|---|---|"]
    for point in result["points"]:
        for each in point["variants"]:
            start = f"| {point['context']:,} | {each['name']} |"
            if "reason" in each:
                lines.append(f"{start} {each['reason']} | | |")
                continue
            milliseconds, gib = 1e3 * median(each["samples_s"]), each["kv_bytes_on_device"] / (1 << 30)
            lines.append(f"{start} {milliseconds:.1f} | {1e3 * each['host_s']:.1f} | {gib:.2f} GiB |")
    return "\n".join(lines)


def answers() -> str:
    """Exact match of what indexes find, on a GPU's host and on a machine without one."""
    return "\n\n".join(quality_table(result_of(name)) for name in ANSWERS)


def written(result: dict[str, Any]) -> str:
    """Recall by stretches of generated tokens."""
    rows = result["rows"]
    starts = [f"{stretch['from']:,}" for stretch in rows[0]["stretches"]]
    lines = [f"| tokens from | {' | '.join(starts)} |", "|---" * (len(starts) + 1) + "|"]
    for row in rows:
        served = " | ".join(f"{each['served']:.3f}" for each in row["stretches"])
        lines.append(f"| {row['name']} | {served} |")
        if any(each["audited"] for each in row["stretches"]):
            alone = " | ".join(f"{each['index']:.3f}" for each in row["stretches"])
            audited = " | ".join(f"{each['audited']:.0%}" for each in row["stretches"])
            lines += [f"| {row['name']}, steps that were not audited | {alone} |", f"| audited | {audited} |"]
    return "\n".join(lines)


def busy() -> str:
    """Time per token beside busy loops, on each machine that measured it."""
    results = [(path.name, json.loads(path.read_text())) for path in sorted(RESULTS.glob(BUSY))]
    if not results:
        return "Not measured yet: `python scripts/busy_machine.py results/busy-machine.json`, then `make docs`."
    return "\n\n".join(
        f"{busy_machine.table(result)}\n\n`results/{name}`: {busy_machine.conditions(result)}"
        for name, result in results
    )


BLOCKS = {
    "busy": busy,
    "answers": answers,
    "written": shown(
        WRITTEN,
        written,
        lambda result: f"{place(WRITTEN)}: {result['machine']}, commit {result['commit'][:10]}.",
    ),
    "host": shown(HOST, points(host_report.point_text), measured_on(HOST)),
    "split": lambda: "\n\n".join(shown(name, split_table, measured_on(name))() for name in SPLIT),
    **{
        f"index-{name.split('-')[1]}": shown(name, points(index_report.point_text), measured_on(name)) for name in INDEX
    },
}
