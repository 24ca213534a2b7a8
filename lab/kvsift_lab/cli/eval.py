"""kvsift eval: scores of plans at equal budgets, resumable sample by sample."""

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
from kvsift.cli.printing import plain
from kvsift.errors import Conflict, InvalidValue, UnwritableFile

if TYPE_CHECKING:
    from kvsift_lab.eval.recipe import EvalRecipe
    from kvsift_lab.eval.runner import RunProgress

LINE_EVERY_S = 60.0


def evaluate(
    recipes: Annotated[list[Path], typer.Argument(help="TOML files: tasks, lengths, plans, budgets.")],
    out: Annotated[
        Path,
        typer.Option("--out", "--output", help="Where the results directory of each recipe is created or resumed."),
    ] = Path("results"),
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes, each with one context at a time.")] = 1,
    max_seconds: Annotated[
        float | None,
        typer.Option("--max-seconds", min=0, help="Stop after this time; the same command resumes."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, help="Threads of each process; by default a share of the cores."),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="Device, instead of the recipe's.")] = None,
    as_json: o.JsonOption = False,
) -> None:
    """Score the answers of plans at equal budgets on the same prefilled contexts."""
    loaded, texts = _load(recipes, device), [path.read_text() for path in recipes]
    _require_directory(out)
    from kvsift_lab.eval.runner import run

    stop_at = None if max_seconds is None else monotonic() + max_seconds
    made = []
    for path, recipe, text in zip(recipes, loaded, texts, strict=True):
        _tell_own_budgets(path.stem, recipe)
        with _progress(path.stem, len(recipe.rows)) as on_progress:
            tables = run(recipe, text, out / path.stem, workers, stop_at, on_progress, threads)
        made.append({"recipe": path.stem, "results": str(out / path.stem), **tables})
        if not as_json:
            _print(made[-1], recipe)
    if as_json:
        print(json.dumps(made, indent=1))


def _load(paths: Sequence[Path], device: str | None) -> list[EvalRecipe]:
    from kvsift_lab.eval.recipe import EvalRecipe

    if len({path.stem for path in paths}) < len(paths):
        raise Conflict("two recipes have the same name, so their results would share a directory.")
    if nameless := [path for path in paths if not path.stem.strip(".")]:
        raise InvalidValue(f"the recipe {nameless[0]} has no name for a results directory; rename it.")
    loaded = [EvalRecipe.load(path) for path in paths]
    return loaded if device is None else [replace(recipe, device=device) for recipe in loaded]


def _tell_own_budgets(label: str, recipe: EvalRecipe) -> None:
    """Say which plans have a budget of their own, where the recipe has budgets for all."""
    own = [row.plan for row in recipe.rows if row.budget is None and row.phase is not None]
    if own:
        print(plain(
            f"kvsift: {label}: each of these plans keeps its own budget, is measured once, and has the same numbers in "
            f"every column: {', '.join(own)}. With budget={{budget}} a plan takes the budgets of the recipe."
        ), file=sys.stderr)  # fmt: skip


def _require_directory(out: Path) -> None:
    """Refuse a path where no directory can be created, before any work."""
    folder = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UnwritableFile(f"--out {out}: no directory can be created there.")


def _print(made: dict[str, Any], recipe: EvalRecipe) -> None:
    from kvsift_lab.eval.tables import score_table

    print(plain(score_table(made, recipe.columns)), end="\n\n")
    for warning in made["warnings"]:
        print(f"kvsift: WARNING: {plain(warning)}", file=sys.stderr)
    left = len(made["left_out"])
    verb = "is" if left == 1 else "are"
    more = f"; {left} of {len(made['contexts'])} contexts {verb} not finished, the same command resumes" if left else ""
    where = plain(made["results"])
    print(f"{where}{more}. Show it with kvsift report {where}")


class TimeLeft:
    """Estimate of the remaining seconds. The plans of a context differ in cost and the first one prefills it, so the
    estimate is updated after each context and counts down in between."""

    def __init__(self) -> None:
        self._first: tuple[float, RunProgress] | None = None
        self._contexts = 0
        self._end: float | None = None

    def at(self, now: float, progress: RunProgress) -> float | None:
        """Return the seconds from ``now``, a time of ``time.monotonic``; None before the first context is finished."""
        if self._first is None:
            self._first, self._contexts = (now, progress), progress.contexts
        start, before = self._first
        if progress.contexts > self._contexts and progress.share > before.share:
            self._contexts = progress.contexts
            self._end = now + (now - start) * (1 - progress.share) / (progress.share - before.share)
        return None if self._end is None else max(self._end - now, 0.0)


def progress_text(progress: RunProgress, left: float | None) -> str:
    """Return the progress of a run in words."""
    text = f"{progress.contexts} of {progress.total} contexts ({progress.share:.0%})"
    if left is None:
        return text
    if left < 90:
        return f"{text}, about {left:.0f} seconds left"
    if left < 7200:
        return f"{text}, about {left / 60:.0f} minutes left"
    return f"{text}, about {left / 3600:.1f} hours left"


@contextmanager
def _progress(label: str, num_plans: int) -> Iterator[Callable[[RunProgress], None]]:
    """Yield a function that shows progress: a bar, or a line per minute in a log.

    Both begin with a line about the work, and have a line with the time that is left after the first context.
    """
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    is_terminal, label = sys.stderr.isatty(), plain(label)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[note]}")
    left, last_line, num_lines = TimeLeft(), monotonic(), 0
    with Bar(*columns, console=Console(stderr=True), disable=not is_terminal, transient=True) as bar:
        task = bar.add_task(label, total=1.0, note="")

        def show(progress: RunProgress) -> None:
            nonlocal last_line, num_lines
            now = monotonic()
            seconds = left.at(now, progress)
            note = progress_text(progress, seconds)
            bar.update(task, completed=progress.share, note=note)
            if not num_lines and progress.contexts < progress.total:
                number = progress.total - progress.contexts
                line = f"{number} context{'s' if number > 1 else ''} to read, each under {num_plans} plans"
                if progress.cost is not None:
                    line += f": {progress.cost[0]:,} tokens to prefill, and {progress.cost[1]:,} to decode at most"
                line += ". The time that this takes is estimated after the first context." if number > 1 else ""
            elif (num_lines == 1 and seconds) or (not is_terminal and now - last_line >= LINE_EVERY_S):
                line = note
            else:
                return
            last_line, num_lines = now, num_lines + 1
            bar.console.print(f"{label}: {line}", markup=False, highlight=False, soft_wrap=True)

        yield show
