"""How far a command has come, on stderr: a bar for a terminal, a line every some seconds for a log."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

from kvsift.cli.escaping import plain

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

LINE_EVERY_S = 10.0


class Progress:
    """Progress of a command that reads, then answers. Nothing is shown outside of the ``with`` block.

    Args:
        quiet: show nothing.
        what: the first thing that is done, of unknown length.
    """

    def __init__(self, quiet: bool = False, what: str = "loading") -> None:
        self._on_terminal = sys.stderr.isatty() and not quiet
        self._in_log = not sys.stderr.isatty() and not quiet
        self._bar: Bar | None = None
        self._what, self._since, self._said, self._first = what, 0.0, 0.0, 0

    def __enter__(self) -> Progress:
        self.loading(self._what)
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def loading(self, what: str = "loading") -> None:
        """Something of unknown length is done."""
        self._show(what, 0, None, "")

    def reading(self, done: int, total: int) -> None:
        """So many tokens of a prompt are prefilled."""
        self._show("reading", done, total, f"{done:,} of {total:,} tokens")

    def answering(self, done: int, total: int, text: str = "") -> None:
        """So many answers are complete; the text of the next one so far."""
        words = plain(" ".join(text[-200:].split()))
        self._show("answering", done, total, f"{done} of {total} answers", words[-40:])

    def clear(self) -> None:
        """Make room for output; the next call shows the bar again."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self, what: str, done: int, total: int | None, note: str, more: str = "") -> None:
        now = monotonic()
        if what != self._what:
            self.clear()
            self._what, self._since, self._said, self._first = what, now, now, done
        if self._on_terminal:
            self._bar = self._bar or _new_bar(what)
            self._bar.update(self._bar.task_ids[0], completed=done, total=total, note=f"{note} {more}".strip())
        elif self._in_log and total is not None and now - self._said >= LINE_EVERY_S:
            self._said, speed = now, (done - self._first) / (now - self._since)
            left = f", {(total - done) / speed:,.0f} s left" if speed else ""
            print(f"kvsift: {what}: {note}{left}", file=sys.stderr, flush=True)


def _new_bar(what: str) -> Bar:
    """A bar that is drawn; one that was stopped would begin a line too high."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    console = Console(stderr=True)
    note = TextColumn("{task.fields[note]}", markup=False, table_column=Column(no_wrap=True, ratio=1))
    bars = [BarColumn(20)] if console.width >= 70 else []
    columns = (TextColumn("{task.description}"), *bars, TaskProgressColumn(), TimeRemainingColumn(), note)
    # stdout is left alone: what a command prints there is no business of stderr's console
    bar = Bar(*columns, console=console, transient=True, expand=True, redirect_stdout=False)
    bar.add_task(what, total=None, note="")
    bar.start()
    return bar


@contextmanager
def prefill_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A function of (tokens done, tokens in all), for a command that only reads."""
    with Progress(what=label) as progress:
        yield progress.reading
