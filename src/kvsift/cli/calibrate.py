"""kvsift calibrate: files that methods need of a model: directions of its keys and queries, or layers that reuse."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvsift.cli import options as o
from kvsift.cli.calibrate_layers import LayerChoices, calibrate_layers, print_layers
from kvsift.cli.escaping import plain
from kvsift.cli.option_groups import expand


@expand
def calibrate(
    *,
    out: Annotated[
        Path, typer.Option("--out", "--output", help="File to write, for loki:calibration=FILE or, with --layers, "
                           "tidal_decode:anchors=FILE."),
    ],
    layers: Annotated[
        bool, typer.Option("--layers", help="Find layers that can reuse the selections of others instead.")
    ] = False,
    chosen: LayerChoices,
    model: o.ModelOption = None,
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", help="Text file, may be repeated; by default generated prose, or with --layers "
                     "generated contexts with questions."),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="The most tokens to read.")] = 16384,
    length: Annotated[int, typer.Option("--length", min=1, help="Tokens of one context.")] = 4096,
    device: o.DeviceOption = "auto",
    dtype: o.DtypeOption = "auto",
    threads: o.ThreadsOption = None,
    as_json: o.JsonOption = False,
) -> None:  # fmt: skip
    """Read texts with a model, and write the principal directions of its keys and queries, or which layers' selections
    serve which others."""
    from rich.console import Console
    from rich.progress import Progress

    chosen.check(layers)
    o.require_writable(out, "--out")
    texts = {str(path): o.read_text(path, "text") for path in text} if text else None
    o.use_threads(threads)
    from kvsift.api.llm import LLM
    from kvsift.calibration.recipe import calibrate as run
    from kvsift.texts.calibration import CHARACTERS, prose_of

    llm = LLM(model, "dense", device=device, dtype=dtype)
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("texts" if layers else "tokens", total=None)
        show = lambda done, total: bar.update(task, completed=done, total=total)  # noqa: E731
        with o.writing(out):
            if layers:
                facts = calibrate_layers(llm, texts, out, tokens, length, chosen, show)
            else:
                sources = texts or {"prose": prose_of(CHARACTERS * tokens)}
                facts = run(llm, sources, out, tokens=tokens, length=length, progress=show)
    if as_json:
        print(json.dumps(facts, indent=2))
    elif layers:
        print_layers(facts)
    else:
        architecture, tokens = facts["model"].partition(",")[0], facts["recipe"]["tokens"]
        print(plain(f"{out}: {facts['layers']} layers of {architecture}, from {tokens:,} tokens of text"))
