"""Files that a full disk, a killed process or a power cut leaves valid."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from kvsift.errors import InputError


class Lines:
    """A file of whole lines that is only appended to, by one process at a time. What a killed process left of a line
    is dropped.

    Attributes:
        path: of the file.
        text: what was in it, whole lines only.
        dropped: bytes of the unfinished line behind that.

    Raises:
        InputError: if another process is appending.
        OSError: if it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise InputError(f"another process is writing to {path}. Wait for it, or give another --out.") from None
        self.text, self.dropped = whole_lines(path)
        self._stop = os.fstat(self._file).st_size - self.dropped
        os.ftruncate(self._file, self._stop)

    def append(self, line: str) -> None:
        """One more line, on the disk when this returns.

        Raises:
            OSError: if there is no room; the file then ends as it did before.
        """
        data = (line + "\n").encode()
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._file, data[written:], self._stop + written)
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._stop)  # takes no room
            raise
        self._stop += len(data)

    def close(self) -> None:
        """Let others write."""
        os.close(self._file)


def whole_lines(path: Path) -> tuple[str, int]:
    """The lines of a file that were finished, and how many bytes follow them."""
    data = path.read_bytes()
    stop = data.rfind(b"\n") + 1
    return data[:stop].decode(errors="replace"), len(data) - stop


def write_atomically(path: Path, text: str) -> None:
    """A file that is the old one or the new one, never half of either, and on the disk when this returns."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def reason(error: OSError) -> str:
    """What went wrong in writing, in plain words."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "the disk is full"
    return f"writing failed ({error.strerror})"
