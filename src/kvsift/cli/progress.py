"""Progress of a command on stderr: a bar on a terminal, a line every few seconds in a log."""

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


class ProgressBar:
    """Progress display of a command that prefills, then answers; active inside its ``with`` block.

    Args:
        quiet: show nothing.
        what: the first activity, of unknown length.
    """

    def __init__(self, quiet: bool = False, what: str = "loading") -> None:
        self._on_terminal = sys.stderr.isatty() and not quiet
        self._in_log = not sys.stderr.isatty() and not quiet
        self._bar: Bar | None = None
        self._what, self._since, self._last_line, self._first = what, 0.0, 0.0, 0

    def __enter__(self) -> ProgressBar:
        self.loading(self._what)
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def loading(self, what: str = "loading") -> None:
        """Show an activity of unknown length."""
        self._show(what, 0, None, "")

    def reading(self, done: int, total: int) -> None:
        """Show the prefilled tokens of a prompt."""
        self._show("reading", done, total, f"{done:,} of {total:,} tokens")

    def working(self, what: str, done: int, total: int | None) -> None:
        """Show an activity of several parts; how many there will be may be unknown."""
        self._show(what, done, total, f"{done:,}" if total is None else f"{done:,} of {total:,}")

    def answering(self, done: int, total: int, text: str = "") -> None:
        """Show the number of finished answers and the text of the current one."""
        words = plain(" ".join(text[-200:].split()))
        self._show("answering", done, total, f"{done} of {total} answers", words[-40:])

    def clear(self) -> None:
        """Remove the bar before other output; the next call shows it again."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self, what: str, done: int, total: int | None, note: str, more: str = "") -> None:
        now = monotonic()
        if what != self._what:
            self.clear()
            self._what, self._since, self._last_line, self._first = what, now, now, done
        if self._on_terminal:
            self._bar = self._bar or _new_bar(what)
            self._bar.update(self._bar.task_ids[0], completed=done, total=total, note=f"{note} {more}".strip())
        elif self._in_log and note and now - self._last_line >= LINE_EVERY_S:
            self._last_line, speed = now, (done - self._first) / (now - self._since)
            left = f", {(total - done) / speed:,.0f} s left" if speed and total is not None else ""
            print(f"kvsift: {what}: {note}{left}", file=sys.stderr, flush=True)


def _new_bar(what: str) -> Bar:
    """Return a running bar; a stopped bar restarts one line too high."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    console = Console(stderr=True)
    note = TextColumn("{task.fields[note]}", markup=False, table_column=Column(no_wrap=True, ratio=1))
    bars = [BarColumn(20)] if console.width >= 70 else []
    columns = (TextColumn("{task.description}"), *bars, TaskProgressColumn(), TimeRemainingColumn(), note)
    # stdout is not redirected to the console of stderr
    bar = Bar(*columns, console=console, transient=True, expand=True, redirect_stdout=False)
    bar.add_task(what, total=None, note="")
    bar.start()
    return bar


@contextmanager
def prefill_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (prefilled tokens, all tokens) for a command that only prefills."""
    with ProgressBar(what=label) as progress:
        yield progress.reading
