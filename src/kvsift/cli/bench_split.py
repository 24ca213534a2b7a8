"""kvsift bench split: decoding with KV in host memory, by index."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvsift.cli import options as o
from kvsift.cli.bench import ContextsOption, OutputOption, bench, keep, lengths, names, teller


@bench.command("split")
def bench_split(
    contexts: ContextsOption = "128K,512K",
    kinds: Annotated[
        str, typer.Option("--kinds", help="Of index: flat, flat_int8, graph, ivf; or quest; or dense, on the device.")
    ] = "flat,flat_int8,graph,quest,dense",
    shape: Annotated[str, typer.Option("--shape", help="Random weights: llama-3-8b or tiny.")] = "llama-3-8b",
    top: Annotated[int, typer.Option("--top", min=1, help="Keys per query head that an index finds.")] = 100,
    scanned: Annotated[float, typer.Option("--scanned", help="Share of the keys that the graph's walk scores.")] = 0.02,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Timed, of each kind.")] = 8,
    device: o.DeviceOption = "auto",
    output: OutputOption = None,
    as_json: o.JsonOption = False,
) -> None:
    """Time decoding of a model with random weights whose KV is in host memory, all but what is always visible."""
    o.require_writable(output, "--output")
    from statistics import median

    from kvsift import native
    from kvsift.benchmarks import machine, split
    from kvsift.benchmarks.numbers import document
    from kvsift.engine.provenance import versions_and_machine
    from kvsift.errors import InputError
    from kvsift.models.transformers_load import choose_device

    if not native.available():
        raise InputError(native.why_missing())
    chosen = choose_device(device)
    recipe = split.Recipe(shape, lengths(contexts, "--contexts"), names(kinds), top, scanned, tokens)
    result: dict[str, Any] = {**split.head(recipe), **versions_and_machine(chosen), "points": []}
    if chosen.type == "cuda":
        result["gpu"] = machine.gpu_facts()
    say = teller(as_json)
    for point in split.run(recipe, chosen):
        result["points"].append(point)
        keep(result, output)
        say(f"{point['context']:,} tokens")
        for each in point["variants"]:
            if "reason" in each:
                say(f"  {each['name']:<10} {each['reason']}")
                continue
            milliseconds, gib = 1e3 * median(each["samples_s"]), each["kv_bytes_on_device"] / (1 << 30)
            say(f"  {each['name']:<10} {milliseconds:8.1f} ms per token, {gib:.2f} GiB of KV on the device")
    if as_json:
        print(document(result))
