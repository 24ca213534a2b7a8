"""kvsift generate: continue a text as it stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvsift.cli import options as o
from kvsift.cli.progress import prefill_progress
from kvsift.errors import InputError


def generate(
    prompt: Annotated[str | None, typer.Option("--prompt", help="Text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option("--prompt-file", help="File with the text to continue.")] = None,
    model: o.ModelOption = None,
    plan: o.PlanOption = "quest:budget=1024",
    max_new_tokens: o.NewTokensOption = 128,
    stop: Annotated[str | None, typer.Option("--stop", help="End when this appears.")] = None,
    temperature: o.TemperatureOption = 0.0,
    top_p: o.TopPOption = 1.0,
    seed: o.SeedOption = 0,
    device: o.DeviceOption = "auto",
    dtype: o.DtypeOption = "auto",
    chunk_size: o.ChunkOption = None,
    probe_every: o.ProbeOption = 16,
    dense_below: o.DenseBelowOption = "auto",
    placement: o.PlacementOption = "device",
    threads: o.ThreadsOption = None,
    strict: o.StrictOption = False,
    as_json: o.JsonOption = False,
) -> None:
    """Continue a text, exactly as given: no template, no instructions added."""
    if (prompt is None) == (prompt_file is None):
        raise InputError("give the text to continue with either --prompt or --prompt-file.")
    text = prompt if prompt_file is None else o.read_text(prompt_file, "prompt")
    assert text is not None
    o.use_threads(threads)
    from rich.console import Console

    from kvsift.cli.report import check_skipped, proof_table, summary
    from kvsift.engine.llm import LLM
    from kvsift.engine.sampling import Sampling
    from kvsift.runtime.spec import parse_plan

    parsed = parse_plan(o.read_plan(plan))
    llm = LLM(
        model, parsed, device=device, dtype=dtype, chunk_size=chunk_size, probe_every=probe_every,
        dense_below=o.dense_below(dense_below), placement=placement,
    )  # fmt: skip
    show = None if as_json else lambda piece: print(piece, end="", flush=True)
    with prefill_progress("reading") as progress:
        answer = llm.generate(
            text,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature, top_p, seed),
            stop=stop,
            progress=progress,
            on_text=show,
        )
    if as_json:
        print(json.dumps({**summary([answer]), "text": answer.text, "token_ids": answer.token_ids}, indent=2))
    else:
        print()
        Console(stderr=True).print(proof_table([summary([answer])]))
    check_skipped(parsed, [answer], strict)
