"""kvsift eval: which plan still answers, at which budget. Resumable, sample by sample."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsift.cli import options as o
from kvsift.errors import InputError

if TYPE_CHECKING:
    from kvsift.eval.recipe import Recipe

LINE_EVERY_S = 60.0


def evaluate(
    recipes: Annotated[list[Path], typer.Argument(help="TOML files: tasks, lengths, plans, budgets.")],
    out: Annotated[
        Path, typer.Option("--out", help="A results directory per recipe is made here, or gone on with, by its name.")
    ] = Path("results"),
    workers: Annotated[int, typer.Option("--workers", min=1, help="Contexts in parallel, a process each.")] = 1,
    max_seconds: Annotated[
        float | None, typer.Option("--max-seconds", min=0, help="Stop after so long; the same command goes on.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Of each process; else they share the processors.")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="Instead of the recipe's.")] = None,
    as_json: o.JsonOption = False,
) -> None:
    """Measure how well plans answer, at equal budgets, on the same prefilled contexts."""
    loaded = _load(recipes, device)
    _require_directory(out)
    from kvsift.eval.runner import run

    stop_at = None if max_seconds is None else monotonic() + max_seconds
    made = []
    for path, recipe in zip(recipes, loaded, strict=True):
        with _progress(path.stem) as told:
            tables = run(recipe, path.read_text(), out / path.stem, workers, stop_at, told, threads)
        made.append({"recipe": path.stem, "results": str(out / path.stem), **tables})
        if not as_json:
            _print(made[-1], recipe)
    if as_json:
        print(json.dumps(made, indent=1))


def _load(paths: Sequence[Path], device: str | None) -> list[Recipe]:
    from kvsift.eval.recipe import Recipe

    if len({path.stem for path in paths}) < len(paths):
        raise InputError("two of the recipes have the same name, and their results would go to the same directory.")
    loaded = [Recipe.load(path) for path in paths]
    return loaded if device is None else [replace(recipe, device=device) for recipe in loaded]


def _require_directory(out: Path) -> None:
    """Refuse a place where no directory can be made, before the work that is to go there."""
    place = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise InputError(f"--out {out}: no directory can be made there.")


def _print(made: dict[str, Any], recipe: Recipe) -> None:
    from kvsift.eval.tables import score_table

    print(score_table(made, recipe.budgets), end="\n\n")
    for warning in made["warnings"]:
        print(f"kvsift: WARNING: {warning}", file=sys.stderr)
    left = len(made["left_out"])
    more = f"; {left} of {len(made['contexts'])} contexts are not finished, the same command goes on" if left else ""
    print(f"{made['results']}{more}. See it with kvsift report {made['results']}")


@contextmanager
def _progress(label: str) -> Iterator[Callable[[float, int], None]]:
    """A function of (cells done, cells in all): a bar with the remaining time, or a line a minute for a log."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    shown = sys.stderr.isatty()
    first: list[tuple[float, float]] = []  # (time, cells done) when this session began
    said = monotonic()
    with Progress(*columns, console=Console(stderr=True), disable=not shown, transient=True) as bar:
        task = bar.add_task(label, total=None)

        def told(done: float, total: int) -> None:
            nonlocal said
            now = monotonic()
            first[:] = first or [(now, done)]
            bar.update(task, completed=done, total=total)
            if not shown and now - said >= LINE_EVERY_S:
                said = now
                rate = (done - first[0][1]) / (now - first[0][0])
                left = f", {(total - done) / rate / 60:.0f} minutes left" if rate else ""
                print(f"{label}: {done:.0f} of {total} plans on contexts{left}", file=sys.stderr, flush=True)

        yield told
