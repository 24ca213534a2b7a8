"""kvsift bench attention: one layer's attention of a decode step, ours against the best dense kernels."""

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
    names,
    teller,
)
from kvsift.errors import InputError

BASELINES = "sdpa-flash,sdpa-cudnn,flashinfer,ours-dense"


@bench.command("attention")
def bench_attention(
    shapes: Annotated[str, typer.Option("--shapes", help="Query heads/KV heads.")] = "32/32,32/8",
    contexts: ContextsOption = "4K,8K,16K,32K,64K,128K,256K,512K",
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences.")] = 1,
    head_dim: Annotated[int, typer.Option("--head-dim", min=8, help="Numbers per head.")] = 128,
    page_size: Annotated[int, typer.Option("--page-size", min=1, help="Tokens per page.")] = 16,
    budget: Annotated[int, typer.Option("--budget", min=1, help="Visible tokens per list.")] = 2048,
    score_by: Annotated[str, typer.Option("--score-by", help="Kinds of page summary.")] = "minmax,minmax_fp8",
    baselines: Annotated[str, typer.Option("--baselines", help="Dense kernels, or none.")] = BASELINES,
    breakdown: Annotated[bool, typer.Option("--breakdown", help="Also time the separate kernels.")] = False,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Samples of each variant.")] = 15,
    bandwidth: BandwidthOption = None,
    max_seconds: SecondsOption = None,
    output: OutputOption = None,
    chart: Annotated[Path | None, typer.Option("--chart", help="Draw the result here, SVG; needs matplotlib.")] = None,
    as_json: o.JsonOption = False,
) -> None:
    """Time attention of one decode step in one layer: cold caches, all variants in turns, the floor beside them."""
    o.require_writable(output, "--out")
    o.require_writable(chart, "--chart")
    check_bandwidth(bandwidth)
    wanted: dict[str, Any] = {"batch": batch, "head_dim": head_dim, "page_size": page_size, "budget": budget}
    wanted |= {"shapes": heads(shapes), "contexts": lengths(contexts, "--contexts"), "score_by": names(score_by)}
    wanted |= {"baselines": names(baselines), "repeats": repeats, "breakdown": breakdown, "max_seconds": max_seconds}
    result = _measured(wanted, bandwidth, output, chart, quiet=as_json)
    if as_json:
        from kvsift.benchmarks.numbers import document

        print(document(result))


def heads(text: str) -> tuple[tuple[int, int], ...]:
    """Pairs from "32/32,32/8".

    Raises:
        InputError: for anything else.
    """
    pairs = []
    for word in names(text):
        query_heads, slash, kv_heads = word.partition("/")
        if not slash:
            raise InputError(f"--shapes {text}: {word!r} must be query heads/KV heads, for instance 32/8.")
        pairs.append(counts(f"{query_heads},{kv_heads}", "--shapes"))
        if len(pairs[-1]) != 2:
            raise InputError(f"--shapes {text}: {word!r} must be query heads/KV heads, for instance 32/8.")
    return tuple((pair[0], pair[1]) for pair in pairs)


def _measured(
    wanted: dict[str, Any], bandwidth: float | None, output: Path | None, chart: Path | None, quiet: bool
) -> dict[str, Any]:
    import torch

    from kvsift.benchmarks import machine
    from kvsift.benchmarks.attention import Recipe, head, run
    from kvsift.benchmarks.attention_text import break_even_lines, point_text, summary
    from kvsift.benchmarks.timing import graph_clock
    from kvsift.engine.provenance import versions_and_machine

    recipe = Recipe(**wanted)
    machine.require_gpu("attention")
    if chart is not None:
        from kvsift.benchmarks.chart import require_matplotlib

        require_matplotlib()
    device = torch.device("cuda", 0)
    speed = machine.bandwidth(bandwidth)
    result: dict[str, Any] = {**head(recipe), **versions_and_machine(device), "gpu": machine.gpu_facts()}
    result |= {"bandwidth": speed, "points": []}
    say = teller(quiet)
    say(machine.bandwidth_text(speed))
    for point in run(recipe, graph_clock, device):
        result["points"].append(point)
        say(point_text(point, speed["used"]))
        keep(result, output)
    if chart is not None:
        from kvsift.benchmarks.chart import attention_chart

        o.write_whole(chart, attention_chart(result))
    say(break_even_lines(result))
    say(json.dumps(summary(result)))
    return result
