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
        str,
        typer.Option(
            "--kinds",
            help="Of index: flat, flat_int8, graph, ivf (needs faiss); or quest; or offload: quest, attended by the "
            "device; or dense, on the device.",
        ),
    ] = "flat,flat_int8,graph,ivf,quest,offload,dense",
    shape: Annotated[str, typer.Option("--shape", help="Random weights: llama-3-8b or tiny.")] = "llama-3-8b",
    top: Annotated[int, typer.Option("--top", min=1, help="Keys per query head that an index finds.")] = 100,
    scanned: Annotated[float, typer.Option("--scanned", help="Share of the keys that the graph's walk scores.")] = 0.02,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Timed, of each kind.")] = 8,
    layers: Annotated[
        int | None, typer.Option("--layers", min=1, help="Of the model, where all of them are too many for the host.")
    ] = None,
    host_values: Annotated[
        str, typer.Option("--host-values", help="model: values as they come; int8: packed, a scale per token and head.")
    ] = "model",
    device: o.DeviceOption = "auto",
    threads: o.ThreadsOption = None,
    output: OutputOption = None,
    as_json: o.JsonOption = False,
) -> None:
    """Time decoding of a model with random weights whose KV is in host memory, all but what is always visible."""
    o.require_writable(output, "--out")
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
    o.use_threads(threads)
    recipe = split.Recipe(
        shape, lengths(contexts, "--contexts"), names(kinds), top, scanned, tokens, layers, host_values,  # type: ignore[arg-type]
    )  # fmt: skip
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
            say(
                f"  {each['name']:<10} {milliseconds:8.1f} ms per token, {gib:.2f} GiB of KV on the device{_busy(each)}"
            )
    if as_json:
        print(document(result))


def _busy(variant: dict[str, Any]) -> str:
    """How long host and device worked, where that was measured, and what was brought to the device."""
    text = ""
    if "both_s" in variant:
        host, device, both = (1e3 * variant[key] for key in ("host_s", "device_s", "both_s"))
        text += f"; host {host:.1f} ms, device {device:.1f} ms, of it both {both:.2f} ms"
    if variant["device_cache_hits"] is not None:
        text += f"; {100 * variant['device_cache_hits']:.0f} % of what was chosen was on the device"
    return text
