"""kvsift quality: which plan still answers, at which budget."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsift.cli import options as o


def quality(
    recipe: Annotated[Path, typer.Option("--recipe", help="TOML file: tasks, length, plans, budgets.")],
    out: Annotated[Path | None, typer.Option("--out", help="Write the result, all samples in it, here.")] = None,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Contexts in parallel, a process each.")] = 1,
    max_seconds: Annotated[
        float | None, typer.Option("--max-seconds", min=0, help="Stop after so long; what is left out is listed.")
    ] = None,
    as_json: o.JsonOption = False,
) -> None:
    """Measure exact match of plans on retrieval tasks, at equal budgets, on the same prefilled contexts."""
    from rich.console import Console
    from rich.progress import Progress

    from kvsift.eval.quality import run
    from kvsift.eval.recipe import Recipe
    from kvsift.eval.report import quality_table

    loaded = Recipe.load(recipe)
    o.require_writable(out, "--out")
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("contexts", total=len(loaded.jobs()))
        told = lambda done, total: bar.update(task, completed=done, total=total)  # noqa: E731
        result = run(loaded, workers, told, max_seconds)
    text = _one_sample_per_line(result)
    if out is not None:
        o.write_whole(out, text + "\n")
    print(text if as_json else quality_table(result))


def _one_sample_per_line(result: dict[str, Any]) -> str:
    head = json.dumps({key: value for key, value in result.items() if key != "samples"}, indent=1)
    samples = ",\n".join(json.dumps(sample) for sample in result["samples"])
    return f'{head[:-2]},\n "samples": [\n{samples}\n]}}'
