"""kvsift bench index: search of all heads of a layer, index by index, at equal recall."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvsift.cli import options as o
from kvsift.cli.bench import ContextsOption, OutputOption, bench, keep, lengths, names, teller
from kvsift.cli.bench_host import (
    HeadDimOption,
    HeadsOption,
    RepeatsOption,
    check_head_dim,
    one_shape,
    say_what_is_missing,
)

INDEXES = "flat,flat_int8,graph,graph_paper,auto,faiss_flat,ivf,hnsw"


@bench.command("index")
def bench_index(
    data: Annotated[
        str, typer.Option("--data", help="Sets: S peaky, T diffuse, R noise, P what --dump holds.")
    ] = "S,T",
    contexts: ContextsOption = "32K,128K",
    k: Annotated[str, typer.Option("--k", help="Keys searched for.")] = "100,2000",
    heads: HeadsOption = "32/8",
    head_dim: HeadDimOption = 128,
    indexes: Annotated[str, typer.Option("--indexes", help="Which; graph_causal is there too.")] = INDEXES,
    dump: Annotated[
        list[Path] | None, typer.Option("--dump", help="File of kvsift bench dump; may be given more than once.")
    ] = None,
    each_head: Annotated[bool, typer.Option("--each-head", help="Measure and tune every KV head alone.")] = False,
    samples: Annotated[
        int, typer.Option("--samples", min=1, help="Prompt queries per query head to learn from.")
    ] = 2048,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Decode steps asked, to tune and to measure.")] = 32,
    target: Annotated[float, typer.Option("--target", help="Recall that indexes are tuned for.")] = 0.95,
    seed: Annotated[int, typer.Option("--seed", help="Of the synthetic sets.")] = 0,
    threads: o.ThreadsOption = None,
    repeats: RepeatsOption = 20,
    output: OutputOption = None,
    as_json: o.JsonOption = False,
) -> None:
    """Time the search of one decode step in one layer: every index at the same recall, in turns, with cold caches."""
    o.require_writable(output, "--out")
    num_query_heads, num_kv_heads = one_shape(heads)
    check_head_dim(head_dim)
    wanted: dict[str, Any] = {"data": names(data), "contexts": lengths(contexts, "--contexts"), "ks": lengths(k, "--k")}
    wanted |= {"num_query_heads": num_query_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    wanted |= {"dumps": tuple(map(str, dump or ())), "indexes": names(indexes), "each_head": each_head}
    wanted |= {"samples": samples, "tokens": tokens, "target": target, "seed": seed, "repeats": repeats}
    result = _measured(wanted, threads, output, as_json)
    if as_json:
        from kvsift.benchmarks.numbers import document

        print(document(result))


def _measured(wanted: dict[str, Any], threads: int | None, output: Path | None, quiet: bool) -> dict[str, Any]:
    import torch

    from kvsift.benchmarks.index_bench import Recipe, head, run
    from kvsift.benchmarks.index_report import medians, point_text, reasons
    from kvsift.benchmarks.qk_dump import Dump
    from kvsift.engine.provenance import versions_and_machine

    recipe = Recipe(**wanted)
    for path in recipe.dumps:
        Dump(Path(path))  # before anything else is measured
    o.use_threads(threads)
    result: dict[str, Any] = {**head(recipe), **versions_and_machine(torch.device("cpu")), "points": []}
    say = teller(quiet)
    say_what_is_missing(result, say)
    known: set[str] = set()
    for point in run(recipe):
        result["points"].append(point)
        say(point_text(point, known))
        known |= reasons(point).keys()
        keep(result, output)
    if len(result["points"]) > len(recipe.ks):
        say(f"medians\n{medians(result['points'])}")
    return result
