"""kvsift calibrate: learn what Loki and InfiniGen want to know about a model beforehand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvsift.cli import options as o
from kvsift.cli.escaping import plain

CHARACTERS_PER_TOKEN = 8  # more than any text has; what is too much is not read


def calibrate(
    out: Annotated[Path, typer.Option("--out", "--output", help="File to write, for loki:calibration=FILE.")],
    model: o.ModelOption = None,
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", help="Text file to read, may be repeated; without it, prose that kvsift makes."),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Read at most so many.")] = 16384,
    length: Annotated[int, typer.Option("--length", min=1, help="Tokens of one context.")] = 4096,
    device: o.DeviceOption = "auto",
    dtype: o.DtypeOption = "auto",
    threads: o.ThreadsOption = None,
    as_json: o.JsonOption = False,
) -> None:
    """Read texts with a model and write the directions in which its keys and queries lie, layer by layer."""
    from rich.console import Console
    from rich.progress import Progress
    from safetensors import SafetensorError

    from kvsift.engine.calibration import calibrate as run
    from kvsift.engine.llm import LLM

    o.require_writable(out, "--out")
    o.use_threads(threads)
    texts = {str(path): o.read_text(path, "text") for path in text} if text else {"prose": _prose(tokens)}
    llm = LLM(model, "dense", device=device, dtype=dtype)
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("tokens", total=None)
        told = lambda done, total: bar.update(task, completed=done, total=total)  # noqa: E731
        with o.writing(out, SafetensorError):
            facts = run(llm, texts, out, tokens=tokens, length=length, progress=told)
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    architecture, tokens = facts["model"].partition(",")[0], facts["recipe"]["tokens"]
    print(plain(f"{out}: {facts['layers']} layers of {architecture}, from {tokens:,} tokens of text"))


def _prose(tokens: int) -> str:
    """The beginning of endless prose, the same on one version of Python."""
    from random import Random

    from kvsift.eval.text import prose

    pieces, written = [], 0
    for piece in prose(Random(0)):
        pieces.append(piece)
        written += len(piece)
        if written >= CHARACTERS_PER_TOKEN * tokens:
            break
    return "".join(pieces)
