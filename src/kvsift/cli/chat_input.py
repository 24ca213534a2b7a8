"""Lines of a chat: typed at a terminal, or from a pipe."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from kvsift.cli.escaping import plain
from kvsift.errors import InputError

PROMPT = "> "
NO_TERMINAL = (
    "--context - takes standard input, and there is no terminal to type questions at. Name a file, or use kvsift ask "
    "with --question."
)


def typed_lines() -> Iterator[str]:
    """Yield lines that are typed, until Ctrl-D; Ctrl-C drops the line. What was typed is listed by the arrow keys where
    Python has readline, and kept nowhere.
    """
    with suppress(ImportError):
        import readline  # noqa: F401  input uses it
    to_terminal = sys.stdout.isatty()
    while True:
        try:
            if not to_terminal:
                print(PROMPT, end="", file=sys.stderr, flush=True)
            yield input(PROMPT if to_terminal else "")
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /quit leaves.)", file=sys.stdout if to_terminal else sys.stderr)
        except EOFError:
            print(file=sys.stdout if to_terminal else sys.stderr)
            return


def piped_lines() -> Iterator[str]:
    """Yield the lines of standard input, which may be closed."""
    for number, line in enumerate(sys.stdin or ()):
        yield (line.removeprefix("\ufeff") if number == 0 else line).rstrip("\r\n")


def echoed(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines, and print each on stderr first, so that what is printed about it there follows its question."""
    for line in lines:
        if line.strip():
            sys.stdout.flush()  # what the line before it has brought
            print(f"{PROMPT}{plain(line.strip())}", file=sys.stderr, flush=True)
        yield line


def read_from_terminal() -> None:
    """Let questions come from the terminal, once standard input was read to its end.

    Raises:
        InputError: if there is none.
    """
    terminal = open_terminal()
    os.dup2(terminal, 0)
    os.close(terminal)
    sys.stdin = open(0, encoding=sys.stdin.encoding, errors="surrogateescape", closefd=False)  # noqa: SIM115


def open_terminal() -> int:
    """Return a descriptor of the terminal of this process.

    Raises:
        InputError: if there is none.
    """
    try:
        return os.open("/dev/tty", os.O_RDWR)
    except OSError:
        raise InputError(NO_TERMINAL) from None


@contextmanager
def one_interrupt() -> Iterator[None]:
    """Let the first Ctrl-C of a block raise ``KeyboardInterrupt``; impatient further ones would break its handling."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
