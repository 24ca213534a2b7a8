"""A program at a pseudo-terminal."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]")


def take_terminal() -> None:
    """Make standard input the terminal of this process, and heed Ctrl-C, which jobs in the background ignore."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """``kvsift`` with arguments at a terminal of so many columns; Ctrl-C and Ctrl-D are typed."""

    def __init__(self, folder: Path, *arguments: object, columns: int = 40) -> None:
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TERM": "xterm", "OMP_NUM_THREADS": "1"}
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
            environment.pop(name, None)
        command = [sys.executable, "-m", "kvsift", *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, cwd=folder, env=environment, start_new_session=True,
            preexec_fn=take_terminal,
        )  # fmt: skip
        os.close(slave)
        self._master, self.raw, self._seen = master, "", 0

    @property
    def text(self) -> str:
        """All output so far, without escapes."""
        return ESCAPES.sub("", self.raw).replace("\r\n", "\n")

    def type(self, keys: str) -> None:
        """Type keys."""
        self._seen = len(self.text)
        os.write(self._master, keys.encode())

    def until(self, pattern: str, seconds: float = 60.0) -> str:
        """Wait for output after what was typed last. Returns that output."""
        stop = time.monotonic() + seconds
        while not re.search(pattern, self.text[self._seen :]):
            assert time.monotonic() < stop, f"no {pattern!r} in {self.text[self._seen :]!r}"
            self._read(0.1)
        return self.text[self._seen :]

    def interrupt_until(self, pattern: str) -> None:
        """Press Ctrl-C until there is an output: Python may miss one pressed as ``input`` has just shown its prompt."""
        for _ in range(10):
            self.type("\x03")
            with suppress(AssertionError):
                self.until(pattern, seconds=3)
                return
        raise AssertionError(f"no {pattern!r} in {self.text!r}")

    def end(self, seconds: float = 60.0) -> int:
        """Wait for the end. Returns the exit code."""
        stop = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < stop, self.text
            self._read(0.1)
        self._read(0.0)
        return self.process.returncode

    def close(self) -> None:
        """End the program, if it lives."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)

    def _read(self, seconds: float) -> None:
        ready: Sequence[int] = select.select([self._master], [], [], seconds)[0]
        try:
            self.raw += os.read(self._master, 1 << 16).decode(errors="replace") if ready else ""
        except OSError:  # the program has ended
            time.sleep(0.02)
