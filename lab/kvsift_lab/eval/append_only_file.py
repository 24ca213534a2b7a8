"""Append-only file of lines, compressed between runs."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kvsift.engine.atomic_files import settle
from kvsift.errors import InputError
from kvsift_lab.eval.packed import pack_large, packed_path, unpacked


class AppendOnlyFile:
    """A file of whole lines, open for appending in one process at a time. An unfinished line of a killed process is
    dropped. A packed file is unpacked before the first appended line.

    Attributes:
        path: of the file.
        source: the file with the lines, plain or packed.
        text: its whole lines.
        dropped: bytes of the unfinished line after them.

    Raises:
        InputError: if another process is appending, or plain and packed file differ.
        OSError: if it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _locked(path)
        try:
            lines, self.dropped, self._packed = _whole_lines(path)
            self.source = packed_path(path) if self._packed else path
            self.text = lines.decode(errors="replace")
            # bytes to write before the first appended line
            self._waiting, self._stop = (lines, 0) if self._packed else (b"", len(lines))
            if not self._packed:
                os.ftruncate(self._file, self._stop)
                packed_path(path).unlink(missing_ok=True)  # its lines are in the longer plain file
                settle(path.parent)
        except BaseException:
            os.close(self._file)
            raise

    def append(self, line: str) -> None:
        """Append a line and flush it to the disk.

        Raises:
            OSError: if the disk is full; the file is unchanged then.
        """
        data = self._waiting + (line + "\n").encode()
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._file, data[written:], self._stop + written)
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._stop)  # needs no room
            raise
        self._stop += len(data)
        if self._packed:
            settle(self.path.parent)
            packed_path(self.path).unlink()
            settle(self.path.parent)
            self._waiting, self._packed = b"", False

    def close(self, whole: bool = False) -> None:
        """Release the lock; pack a large file if it is ``whole``.

        Raises:
            OSError: if the disk is full; the file stays plain then.
        """
        try:
            if self._packed:
                self.path.unlink(missing_ok=True)  # nothing was appended
            elif whole:
                pack_large(self.path)
        finally:
            os.close(self._file)


def _locked(path: Path) -> int:
    """Open the file under an exclusive lock; create it if missing."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise InputError(f"another process is writing to {path}. Wait for it, or give another --out.") from None
        if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
            return file
        os.close(file)  # another process replaced it between the two steps


def whole_lines(path: Path) -> bytes:
    """Return the finished lines of a file, plain or packed.

    Raises:
        OSError: if it is missing or cannot be read.
        InputError: if plain and packed file differ.
    """
    return _whole_lines(path)[0]


def _whole_lines(path: Path) -> tuple[bytes, int, bool]:
    """Return the finished lines, the number of bytes after them, and whether they are packed. If a killed process left
    both files, one begins with the other and the longer one counts."""
    packed = _packed_lines(path)
    plain = path.read_bytes() if packed is None or path.exists() else b""
    if packed is not None and packed.startswith(plain):
        return packed, 0, True
    if packed is not None and not plain.startswith(packed):
        raise InputError(
            f"{path} and {packed_path(path).name} beside it differ. Keep one of them and remove the other."
        )
    stop = plain.rfind(b"\n") + 1
    return plain[:stop], len(plain) - stop, False


def _packed_lines(path: Path) -> bytes | None:
    try:
        return unpacked(packed_path(path))
    except FileNotFoundError:
        return None
