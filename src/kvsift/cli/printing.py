"""What commands print: text that a terminal cannot execute, text as it is generated, and progress on stderr."""

from __future__ import annotations

import re
import sys
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.text import Text

LINE_EVERY_S = 10.0  # of progress in a log

# Control characters except newline and tab, which include terminal escapes; marks of writing direction; surrogates,
# which stand for bytes that are not UTF-8. It is compiled at its first use: a --help has none.
UNSAFE = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"


def plain(text: str) -> str:
    """Return the text with unsafe characters written out: ``\\x1b``."""
    return re.sub(UNSAFE, lambda match: match[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def cell(text: str, style: str = "") -> Text:
    """Return the same for rich, which reads [x] in a string as markup."""
    from rich.text import Text

    return Text(plain(text), style=style)


def console(stderr: bool = False) -> Console:
    """Return a console of rich that colours nothing by itself."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def counted(number: int, noun: str) -> str:
    """Return a number of things: ``1 token``, ``2 tokens``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


class StrippedText:
    """Pieces of a text as they come.

    Attributes:
        text: all pieces so far, with all white space.
    """

    def __init__(self) -> None:
        self.text = ""

    def add(self, piece: str) -> str:
        """Add a piece. Returns what can be shown now: white space waits for the text after it."""
        before, self.text = self.text, self.text + piece
        return self.text.strip()[len(before.strip()) :]


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
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    out = console(stderr=True)
    note = TextColumn("{task.fields[note]}", markup=False, table_column=Column(no_wrap=True, ratio=1))
    bars = [BarColumn(20)] if out.width >= 70 else []
    columns = (TextColumn("{task.description}"), *bars, TaskProgressColumn(), TimeRemainingColumn(), note)
    # stdout is not redirected to the console of stderr
    bar = Bar(*columns, console=out, transient=True, expand=True, redirect_stdout=False)
    bar.add_task(what, total=None, note="")
    bar.start()
    return bar
