"""kvsift bench prefill: time to the first token, and prefill attention of one layer, dense and by plans."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvsift.cli import options as o
from kvsift.cli.bench import ContextsOption, OutputOption, SecondsOption, bench, counts, keep, lengths, teller
from kvsift.errors import InputError

PLANS = "prefill=quoka:budget=1024:chunk=512:dense_layers=none;prefill=critiprefill:budget=1024:page_size=32"


@bench.command("prefill")
def bench_prefill(
    contexts: ContextsOption = "32K,64K,128K",
    plans: Annotated[str, typer.Option("--plans", help="Plans, with ; between them.")] = PLANS,
    part: Annotated[
        str,
        typer.Option("--part", help="ttft: the whole model. layer: attention of one layer. chunk: of one chunk in it."),
    ] = "ttft",
    shape: Annotated[str, typer.Option("--shape", help="Random weights: llama-3-8b or tiny.")] = "llama-3-8b",
    heads: Annotated[str, typer.Option("--heads", help="Of a layer: query heads/KV heads.")] = "32/8",
    chunk: Annotated[
        str, typer.Option("--chunk", help="Tokens per forward pass; dense prefill takes the best of several.")
    ] = "2048,8192",
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Samples of each variant.")] = 3,
    device: o.DeviceOption = "auto",
    max_seconds: SecondsOption = None,
    output: OutputOption = None,
    as_json: o.JsonOption = False,
) -> None:
    """Time prefill: to the first token of a model with random weights, or its attention in one layer alone."""
    o.require_writable(output, "--out")
    wanted = tuple(plan.strip() for plan in plans.split(";") if plan.strip())
    common: dict[str, Any] = {"contexts": lengths(contexts, "--contexts"), "plans": wanted, "repeats": repeats}
    chunks = counts(chunk, "--chunk")
    if part == "ttft":
        recipe = common | {"shape": shape, "chunks": chunks, "max_seconds": max_seconds}
    elif part in ("layer", "chunk"):
        if max_seconds is not None:
            raise InputError(
                f"--max-seconds works with --part ttft only; leave it out, or give fewer --contexts to {part}."
            )
        from kvsift.cli.bench_attention import heads as pairs

        num_query_heads, num_kv_heads = pairs(heads)[0]
        recipe = common | {"chunk": chunks[-1], "whole": part == "layer"}
        recipe |= {"num_query_heads": num_query_heads, "num_kv_heads": num_kv_heads}
    else:
        raise InputError(f"--part {part} must be ttft, layer or chunk.")
    result = _measured(part, recipe, device, output, quiet=as_json)
    if as_json:
        from kvsift.benchmarks.numbers import document

        print(document(result))


def _measured(part: str, wanted: dict[str, Any], device_name: str, output: Path | None, quiet: bool) -> dict[str, Any]:

    from kvsift.benchmarks import machine, prefill, prefill_layer
    from kvsift.benchmarks.prefill_report import point_text
    from kvsift.engine.provenance import versions_and_machine
    from kvsift.models.transformers_load import choose_device

    device = choose_device(device_name)
    points: Any
    if part == "ttft":
        recipe = prefill.Recipe(**wanted)
        found, points = prefill.head(recipe), prefill.run(recipe, device)
    else:
        of_layer = prefill_layer.Recipe(**wanted)
        found, points = prefill_layer.head(of_layer), prefill_layer.run(of_layer, device)
    result: dict[str, Any] = {**found, **versions_and_machine(device), "points": []}
    if device.type == "cuda":
        result["gpu"] = machine.gpu_facts()
    say = teller(quiet)
    for point in points:
        result["points"].append(point)
        say(point_text(point))
        keep(result, output)
    return result
