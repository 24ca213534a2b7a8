"""kvsift bench decode: the engine's decode loop end to end, sifting against showing everything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsift.cli import options as o
from kvsift.cli.bench import (
    BandwidthOption,
    ContextsOption,
    OutputOption,
    SecondsOption,
    bench,
    check_bandwidth,
    counts,
    keep,
    lengths,
    teller,
)


@bench.command("decode")
def bench_decode(
    shape: Annotated[str, typer.Option("--shape", help="Random weights: llama-3-8b or tiny.")] = "llama-3-8b",
    model: o.ModelOption = None,
    contexts: ContextsOption = "32K,128K",
    batch: Annotated[str, typer.Option("--batch", help="Sequences, for instance 1,4.")] = "1,4",
    plan: Annotated[str, typer.Option("--plan", help="What is compared with dense.")] = "quest:budget=2048",
    steps: Annotated[int, typer.Option("--steps", min=2, help="Tokens decoded for a sample.")] = 32,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Samples of each variant.")] = 5,
    profile: Annotated[bool, typer.Option("--profile", help="Also sum the kernels of a step by name.")] = False,
    bandwidth: BandwidthOption = None,
    max_seconds: SecondsOption = None,
    output: OutputOption = None,
    as_json: o.JsonOption = False,
) -> None:
    """Time decoding end to end, dense and sifted in turns, on random keys and values; --model replaces --shape."""
    o.require_writable(output, "--out")
    check_bandwidth(bandwidth)
    wanted = {
        "model": shape if model is None else str(model), "contexts": lengths(contexts, "--contexts"),
        "batches": counts(batch, "--batch"), "plan": plan, "steps": steps, "repeats": repeats, "profile": profile,
        "max_seconds": max_seconds,
    }  # fmt: skip
    result = _measured(wanted, bandwidth, output, random=model is None, quiet=as_json)
    if as_json:
        from kvsift.benchmarks.numbers import document

        print(document(result))


def _measured(
    wanted: dict[str, Any], bandwidth: float | None, output: Path | None, random: bool, quiet: bool
) -> dict[str, Any]:
    import torch

    from kvsift.benchmarks import machine
    from kvsift.benchmarks.decode import Recipe, head, load, run
    from kvsift.benchmarks.decode_report import point_text, summary
    from kvsift.engine.provenance import versions_and_machine

    recipe = Recipe(**wanted, random=random)
    machine.require_gpu("decode")
    device = torch.device("cuda", 0)
    speed = machine.bandwidth(bandwidth)
    result: dict[str, Any] = {**head(recipe), **versions_and_machine(device), "gpu": machine.gpu_facts()}
    result |= {"bandwidth": speed, "points": []}
    say = teller(quiet)
    say(machine.bandwidth_text(speed))
    for point in run(recipe, load(recipe, device)):
        result["points"].append(point)
        say(point_text(point, speed["used"]))
        keep(result, output)
    say(json.dumps(summary(result)))
    return result
