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
from kvsift.cli.escaping import plain
from kvsift.errors import InputError

if TYPE_CHECKING:
    from kvsift.eval.recipe import Recipe
    from kvsift.eval.runner import Progress

LINE_EVERY_S = 60.0


def evaluate(
    recipes: Annotated[list[Path], typer.Argument(help="TOML files: tasks, lengths, plans, budgets.")],
    out: Annotated[
        Path,
        typer.Option(
            "--out", "--output", help="A results directory per recipe is made here, or gone on with, by its name."
        ),
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
    if nameless := [path for path in paths if not path.stem.strip(".")]:
        raise InputError(f"the recipe {nameless[0]} has no name that a results directory could have; rename it.")
    loaded = [Recipe.load(path) for path in paths]
    return loaded if device is None else [replace(recipe, device=device) for recipe in loaded]


def _require_directory(out: Path) -> None:
    """Refuse a place where no directory can be made, before the work that is to go there."""
    place = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise InputError(f"--out {out}: no directory can be made there.")


def _print(made: dict[str, Any], recipe: Recipe) -> None:
    from kvsift.eval.tables import score_table

    print(plain(score_table(made, recipe.budgets)), end="\n\n")
    for warning in made["warnings"]:
        print(f"kvsift: WARNING: {plain(warning)}", file=sys.stderr)
    left = len(made["left_out"])
    more = f"; {left} of {len(made['contexts'])} contexts are not finished, the same command goes on" if left else ""
    where = plain(made["results"])
    print(f"{where}{more}. See it with kvsift report {where}")


class TimeLeft:
    """An estimate of the seconds that are left. Plans of one context differ in what they cost, and the first of them
    reads it, so it is made anew only when a context is finished; between those it counts down."""

    def __init__(self) -> None:
        self._first: tuple[float, Progress] | None = None
        self._contexts = 0
        self._end: float | None = None

    def at(self, now: float, progress: Progress) -> float | None:
        """Seconds from ``now``, a time of ``time.monotonic``; None before the first context is finished."""
        if self._first is None:
            self._first, self._contexts = (now, progress), progress.contexts
        (begun, before) = self._first
        if progress.contexts > self._contexts and progress.share > before.share:
            self._contexts = progress.contexts
            self._end = now + (now - begun) * (1 - progress.share) / (progress.share - before.share)
        return None if self._end is None else max(self._end - now, 0.0)


def progress_text(progress: Progress, left: float | None) -> str:
    """Where a run stands, in words."""
    text = f"{progress.contexts} of {progress.of} contexts ({progress.share:.0%})"
    if left is None:
        return text
    if left < 90:
        return f"{text}, about {left:.0f} seconds left"
    if left < 7200:
        return f"{text}, about {left / 60:.0f} minutes left"
    return f"{text}, about {left / 3600:.1f} hours left"


@contextmanager
def _progress(label: str) -> Iterator[Callable[[Progress], None]]:
    """A function that shows where a run stands: a bar, or a line a minute for a log."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    shown, label = sys.stderr.isatty(), plain(label)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[stands]}")
    left, said = TimeLeft(), monotonic()
    with Bar(*columns, console=Console(stderr=True), disable=not shown, transient=True) as bar:
        task = bar.add_task(label, total=1.0, stands="")

        def told(progress: Progress) -> None:
            nonlocal said
            now = monotonic()
            stands = progress_text(progress, left.at(now, progress))
            bar.update(task, completed=progress.share, stands=stands)
            if not shown and now - said >= LINE_EVERY_S:
                said = now
                print(f"{label}: {stands}", file=sys.stderr, flush=True)

        yield told
