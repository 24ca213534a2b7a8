"""kvsift bench host: attention of a decode step on the processor, against torch's forms and the floor."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvsift.cli import options as o
from kvsift.cli.bench import ContextsOption, OutputOption, bench, counts, keep, lengths, names, teller
from kvsift.errors import InputError

HeadsOption = Annotated[str, typer.Option("--heads", help="Query heads/KV heads.")]
HeadDimOption = Annotated[int, typer.Option("--head-dim", min=16, help="Numbers per head, a multiple of 8.")]
RepeatsOption = Annotated[int, typer.Option("--repeats", min=1, help="Samples of each variant.")]


@bench.command("host")
def bench_host(
    contexts: ContextsOption = "8K,32K,128K",
    heads: HeadsOption = "32/8",
    head_dim: HeadDimOption = 128,
    budget: Annotated[int, typer.Option("--budget", min=1, help="Tokens of a selection of pages.")] = 2048,
    page_size: Annotated[int, typer.Option("--page-size", min=1, help="Tokens per page.")] = 16,
    tokens: Annotated[
        str, typer.Option("--tokens", help="Tokens per query head of a selection of tokens.")
    ] = "100,2000",
    index: Annotated[
        str, typer.Option("--index", help="What finds the keys of a retrieval step: auto, graph, flat, ..., none.")
    ] = "auto",
    top: Annotated[int, typer.Option("--top", min=1, help="Keys per query head that it finds.")] = 100,
    data: Annotated[str, typer.Option("--data", help="Set that keys and queries come from: R, S or T.")] = "S",
    samples: Annotated[
        int, typer.Option("--samples", min=1, help="Prompt queries per query head to learn from.")
    ] = 2048,
    threads: o.ThreadsOption = None,
    repeats: RepeatsOption = 20,
    output: OutputOption = None,
    as_json: o.JsonOption = False,
) -> None:
    """Time attention of one decode step in one layer on the processor: cold caches, all variants in turns."""
    o.require_writable(output, "--out")
    num_query_heads, num_kv_heads = one_shape(heads)
    check_head_dim(head_dim)
    wanted: dict[str, Any] = {"contexts": lengths(contexts, "--contexts"), "tokens": counts(tokens, "--tokens")}
    wanted |= {"num_query_heads": num_query_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    wanted |= {"budget": budget, "page_size": page_size, "index": index, "top": top, "data": data}
    result = _measured(wanted | {"samples": samples, "repeats": repeats}, threads, output, as_json)
    if as_json:
        from kvsift.benchmarks.numbers import document

        print(document(result))


def one_shape(text: str) -> tuple[int, int]:
    """Query heads and KV heads from "32/8".

    Raises:
        InputError: for anything else.
    """
    words = text.split("/")
    if len(words) != 2 or not all(word.isdecimal() and int(word) for word in words) or names(text) != (text,):
        raise InputError(f"--heads {text}: give query heads/KV heads, for instance 32/8.")
    return int(words[0]), int(words[1])


def check_head_dim(head_dim: int) -> None:
    """Refuse what the compiled core cannot read.

    Raises:
        InputError: for what is no multiple of 8, or above 256.
    """
    if head_dim % 8 or head_dim > 256:
        raise InputError(f"--head-dim {head_dim} must be a multiple of 8, up to 256.")


def say_what_is_missing(found: dict[str, Any], say: Any) -> None:
    """Threads and instruction set; or that the compiled core is not there."""
    from kvsift import native

    say(f"{found['threads']} threads, {found['level'] or native.why_missing()}")


def _measured(wanted: dict[str, Any], threads: int | None, output: Any, quiet: bool) -> dict[str, Any]:
    import torch

    from kvsift.benchmarks.host import Recipe, head, run
    from kvsift.benchmarks.host_report import point_text
    from kvsift.engine.provenance import versions_and_machine

    recipe = Recipe(**wanted)
    o.use_threads(threads)
    result: dict[str, Any] = {**head(recipe), **versions_and_machine(torch.device("cpu")), "points": []}
    say = teller(quiet)
    say_what_is_missing(result, say)
    for point in run(recipe):
        result["points"].append(point)
        say(point_text(point))
        keep(result, output)
    return result
