"""Measurements on hosts, as the benchmarks print them: for docs/host.md and the pages beside the results."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from kvsift_lab.bench import host as host_report
from kvsift_lab.bench import index as index_report
from kvsift_lab.docs.papers import RESULTS, result_of
from kvsift_lab.docs.speed import measured_on, place, shown
from kvsift_lab.eval.packed import read_stored
from kvsift_lab.eval.tables import quality_table
from kvsift_lab.studies import busy_machine

HOST, HOST_SKETCH = "host-cpu.json", "host-sketch-cpu.json"
SPLIT = ("split-h200.json", "split-512k-h200.json", "split-1m-h200.json")
SPLIT_SKETCH = ("split-sketch-h200.json", "split-sketch-1m-h200.json")
ANSWERS = ("retrieval-32k", "retrieval-host-32k")
WRITTEN = "generation-recall-cpu.json"
BY_BLOCK, BY_BLOCK_ANSWERS = "block-recall-cpu.json", "retrieval-blocks-32k"
BUSY = "busy-machine*.json*"
INDEX = ("index-st-cpu.json", "index-p-cpu.json")


def points(text: Callable[[dict[str, Any]], str]) -> Callable[[dict[str, Any]], str]:
    """Return a part: the text of every point of a result."""
    return lambda result: "\n\n".join(text(point).strip() for point in result["points"])


def split_table(result: dict[str, Any]) -> str:
    """Return milliseconds per token by context and index."""
    layers = result["recipe"].get("layers")
    context = f"context, {layers} layers" if layers else "context"
    lines = [f"| {context} | index | ms per token | host ms | KV on the device |", "|---|---|---|---|---|"]
    for point in result["points"]:
        for variant in point["variants"]:
            start = f"| {point['context']:,} | {variant['name']} |"
            if "reason" in variant:
                lines.append(f"{start} {variant['reason']} | | |")
                continue
            milliseconds, gib = 1e3 * median(variant["samples_s"]), variant["kv_bytes_on_device"] / (1 << 30)
            lines.append(f"{start} {milliseconds:.1f} | {1e3 * variant['host_s']:.1f} | {gib:.2f} GiB |")
    return "\n".join(lines)


def split_tables(names: Sequence[str]) -> str:
    """Return the tables of several results."""
    return "\n\n".join(shown(name, split_table, measured_on(name))() for name in names)


def answers() -> str:
    """Return exact match with indexes, on a GPU's host and on a machine without one."""
    return "\n\n".join(quality_table(result_of(name)) for name in ANSWERS)


def written(result: dict[str, Any]) -> str:
    """Return recall by stretches of generated tokens."""
    rows = result["rows"]
    starts = [f"{stretch['from']:,}" for stretch in rows[0]["stretches"]]
    lines = [f"| tokens from | {' | '.join(starts)} |", "|---" * (len(starts) + 1) + "|"]
    for row in rows:
        stretches = row["stretches"]
        lines.append(_row(row["name"], [f"{stretch['served']:.3f}" for stretch in stretches]))
        if any(stretch["audited"] for stretch in stretches):
            alone = [f"{stretch['index']:.3f}" for stretch in stretches]
            lines.append(_row(f"{row['name']}, steps that were not audited", alone))
            lines.append(_row("audited", [f"{stretch['audited']:.0%}" for stretch in stretches]))
    return "\n".join(lines)


def by_block(result: dict[str, Any]) -> str:
    """Return what indexes by block found, read and took, by context."""
    heads = ("found", "ten best", "recovery", "KiB read", "ms", "build s")
    contexts = dict.fromkeys((row["task"], row["length"]) for row in result["rows"])
    parts = []
    for context in contexts:
        lines = [f"| {context[0]}, {context[1]:,} tokens | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
        for row in result["rows"]:
            if (row["task"], row["length"]) == context:
                shares = [f"{row[key]:.3f}" for key in ("found", "heaviest", "recovery")]
                lines.append(
                    _row(f"`{row['plan']}`", [*shares, f"{row['kib']:,}", f"{row['ms']:.2f}", f"{row['build_s']:.1f}"])
                )
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _row(name: str, cells: list[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def busy() -> str:
    """Return the time per token beside busy loops, for each measured machine."""
    results = [(path.name, json.loads(read_stored(path))) for path in sorted(RESULTS.glob(BUSY))]
    if not results:
        command = "python -m kvsift_lab.studies.busy_machine results/busy-machine.json"
        return f"Not measured yet: `{command}`, then `make docs`."
    return "\n\n".join(
        f"{busy_machine.table(result)}\n\n`results/{name}`: {busy_machine.conditions(result)}"
        for name, result in results
    )


BLOCKS = {
    "docs/host.md": {
        "busy": busy,
        "answers": answers,
        "written": shown(
            WRITTEN,
            written,
            lambda result: f"{place(WRITTEN)}: {result['machine']}, commit {result['commit'][:10]}.",
        ),
        "split": lambda: split_tables(SPLIT_SKETCH),
    },
    "results/block-recall-cpu.md": {
        "by-block": shown(
            BY_BLOCK,
            by_block,
            lambda result: f"{place(BY_BLOCK)}: {result['machine']}, commit {result['commit'][:10]}.",
        ),
        "by-block-answers": lambda: quality_table(result_of(BY_BLOCK_ANSWERS)),
    },
    "results/split-h200.md": {"split": lambda: split_tables(SPLIT)},
    "results/host-cpu.md": {
        "host": shown(HOST, points(host_report.point_text), measured_on(HOST)),
        "sketches": shown(HOST_SKETCH, points(host_report.point_text), measured_on(HOST_SKETCH)),
    },
    **{
        f"results/{name.removesuffix('.json')}.md": {
            f"index-{name.split('-')[1]}": shown(name, points(index_report.point_text), measured_on(name))
        }
        for name in INDEX
    },
}
