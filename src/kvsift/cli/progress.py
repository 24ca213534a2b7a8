"""How far a command has come, on stderr: a bar for a terminal, a line every some seconds for a log."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from kvsift.cli.escaping import plain

LINE_EVERY_S = 10.0


class Progress:
    """Progress of a command that reads, then answers. Nothing is shown outside of the ``with`` block.

    Args:
        quiet: show nothing.
        what: the first thing that is done, of unknown length.
    """

    def __init__(self, quiet: bool = False, what: str = "loading") -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
        from rich.table import Column

        self._in_log = not quiet and not sys.stderr.isatty()
        self._what, self._since, self._said, self._first = "", 0.0, 0.0, 0
        note = TextColumn("{task.fields[note]}", markup=False, table_column=Column(no_wrap=True, ratio=1))
        columns = TextColumn("{task.description}"), BarColumn(20), TaskProgressColumn(), TimeRemainingColumn(), note
        # stdout is left alone: what a command prints there is no business of stderr's console
        self._bar = Bar(
            *columns, console=Console(stderr=True), disable=quiet or self._in_log, transient=True, expand=True,
            redirect_stdout=False,
        )  # fmt: skip
        self._task = self._bar.add_task(what, total=None, note="")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def loading(self, what: str = "loading") -> None:
        """Something of unknown length is done."""
        self._show(what, 0, None, "")

    def reading(self, done: int, total: int) -> None:
        """So many tokens of a prompt are prefilled."""
        speed = self._show("reading", done, total, f"{done:,} of {total:,} tokens")
        if speed:
            self._bar.update(self._task, note=f"{done:,} of {total:,} tokens, {speed:,.0f}/s")

    def answering(self, done: int, total: int, text: str = "") -> None:
        """So many answers are complete; the text of the next one so far."""
        words = plain(" ".join(text[-200:].split()))
        self._show("answering", done, total, f"{done} of {total} answers", words[-40:])

    def clear(self) -> None:
        """Make room for output; the next call shows the bar again."""
        self._bar.stop()

    def _show(self, what: str, done: int, total: int | None, note: str, more: str = "") -> float:
        """Show it where it is due. Returns what is done per second."""
        now = monotonic()
        if what != self._what:
            self._what, self._since, self._said, self._first = what, now, now, done
            self._bar.reset(self._task, description=what)
        speed = (done - self._first) / (now - self._since) if now > self._since else 0.0
        self._bar.start()
        self._bar.update(self._task, completed=done, total=total, note=f"{note} {more}".strip())
        if self._in_log and total is not None and now - self._said >= LINE_EVERY_S:
            self._said = now
            left = f", {(total - done) / speed:,.0f} s left" if speed else ""
            print(f"kvsift: {what}: {note}{left}", file=sys.stderr, flush=True)
        return speed


@contextmanager
def prefill_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A function of (tokens done, tokens in all), for a command that only reads."""
    with Progress(what=label) as progress:
        yield progress.reading
