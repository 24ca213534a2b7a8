"""kvsift calibrate: the calibration file of a model for Loki and InfiniGen."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvsift.cli import options as o
from kvsift.cli.escaping import plain

CHARACTERS_PER_TOKEN = 8  # an upper bound; surplus text is not used


def calibrate(
    out: Annotated[Path, typer.Option("--out", "--output", help="File to write, for loki:calibration=FILE.")],
    model: o.ModelOption = None,
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", help="Text file, may be repeated; by default generated prose."),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="The most tokens to read.")] = 16384,
    length: Annotated[int, typer.Option("--length", min=1, help="Tokens of one context.")] = 4096,
    device: o.DeviceOption = "auto",
    dtype: o.DtypeOption = "auto",
    threads: o.ThreadsOption = None,
    as_json: o.JsonOption = False,
) -> None:
    """Prefill texts with a model and write the principal directions of its keys and queries, layer by layer."""
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
        show = lambda done, total: bar.update(task, completed=done, total=total)  # noqa: E731
        with o.writing(out, SafetensorError):
            facts = run(llm, texts, out, tokens=tokens, length=length, progress=show)
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    architecture, tokens = facts["model"].partition(",")[0], facts["recipe"]["tokens"]
    print(plain(f"{out}: {facts['layers']} layers of {architecture}, from {tokens:,} tokens of text"))


def _prose(tokens: int) -> str:
    """Return the beginning of endless prose, the same on one version of Python."""
    from random import Random

    from kvsift.eval.text import prose

    text, pieces = "", prose(Random(0))
    while len(text) < CHARACTERS_PER_TOKEN * tokens:
        text += next(pieces)
    return text
