"""kvsift generate: continue a text as it stands."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvsift.cli import options as o
from kvsift.cli.escaping import plain
from kvsift.cli.progress import Progress
from kvsift.cli.report import Column, Reading, cut_mark, print_proof
from kvsift.errors import InputError


def generate(
    prompt: Annotated[str | None, typer.Option("--prompt", help="Text to continue.")] = None,
    prompt_file: Annotated[
        str | None, typer.Option("--prompt-file", help="File with the text to continue; - is stdin.")
    ] = None,
    model: o.ModelOption = None,
    plan: o.PlanOption = "quest:budget=1024",
    max_new_tokens: o.NewTokensOption = 128,
    stop: o.StopOption = None,
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
    out: Annotated[
        Path | None,
        typer.Option("--out", "--output", help="Write the text, or what --json prints, to this file."),
    ] = None,
    quiet: o.QuietOption = False,
    verbose: o.VerboseOption = False,
    as_json: o.JsonOption = False,
) -> None:
    """Continue a text, exactly as given: no template, no instructions added."""
    if (prompt is None) == (prompt_file is None):
        raise InputError("give the text to continue with either --prompt or --prompt-file.")
    spec = o.read_plan(plan)
    o.require_writable(out, "--out")
    text = o.read_texts([prompt_file], "prompt") if prompt_file is not None else str(prompt)
    o.use_threads(threads)
    with Progress(quiet) as progress:
        from kvsift.engine.llm import LLM
        from kvsift.engine.sampling import Sampling
        from kvsift.runtime.spec import parse_plan

        parsed, sampling = parse_plan(spec), Sampling(temperature, top_p, seed)
        progress.clear()  # a download draws bars of its own
        llm = LLM(
            model, parsed, device=device, dtype=dtype, chunk_size=chunk_size, probe_every=probe_every,
            dense_below=o.dense_below(dense_below), placement=placement,
        )  # fmt: skip

        def show(piece: str) -> None:
            progress.clear()
            print(plain(piece) if to_terminal() else piece, end="", flush=True)

        progress.loading("loading the model")
        answer = llm.generate(
            text,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=stop,
            progress=progress.reading,
            on_text=None if as_json or out is not None else show,
        )
    column = Column(parsed, [answer], Reading(density=answer.stats["phases"]["prefill"]["density"]))
    made = answer.text
    if as_json:
        fields = {"text": made, "token_ids": answer.token_ids, "finish_reason": answer.finish_reason}
        made = json.dumps({**column.summary(), **fields}, indent=2) + "\n"
    if out is not None:
        o.write_whole(out, made)
    else:
        print(made if as_json else "", end="" if as_json else "\n")
    if not as_json and not quiet:
        if mark := cut_mark(answer).strip():
            print(mark, file=sys.stderr)
        print_proof([column.summary()], verbose, to_stderr=True)
    if model is None and not quiet:
        print(f"kvsift: WARNING: {o.EMBEDDED_NOTE}", file=sys.stderr)
    column.check_skipped(strict)


def to_terminal() -> bool:
    """Whether the text is seen by a person; a file or another program gets it as it is."""
    return sys.stdout.isatty()
