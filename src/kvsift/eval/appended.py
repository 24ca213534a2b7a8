"""A file of lines that is only appended to, and that may be packed while nothing is."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kvsift.errors import InputError
from kvsift.eval.durable import settle
from kvsift.eval.packed import pack_large, packed_path, unpacked


class Lines:
    """A file of whole lines that is only appended to, by one process at a time. What a killed process left of a line
    is dropped. A packed file is unpacked before the first line that is appended to it, and stays as it is without.

    Attributes:
        path: of the file.
        source: the file that the lines are in, plain or packed.
        text: what was in it, whole lines only.
        dropped: bytes of the unfinished line behind that.

    Raises:
        InputError: if another process is appending, or plain and packed file do not agree.
        OSError: if it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _locked(path)
        try:
            lines, self.dropped, self._packed = _whole_lines(path)
            self.source = packed_path(path) if self._packed else path
            self.text = lines.decode(errors="replace")
            # to be written before the first line that is appended
            self._waiting, self._stop = (lines, 0) if self._packed else (b"", len(lines))
            if not self._packed:
                os.ftruncate(self._file, self._stop)
                packed_path(path).unlink(missing_ok=True)  # its lines are in the longer plain file
                settle(path.parent)
        except BaseException:
            os.close(self._file)
            raise

    def append(self, line: str) -> None:
        """One more line, on the disk when this returns.

        Raises:
            OSError: if there is no room; the file then ends as it did before.
        """
        data = self._waiting + (line + "\n").encode()
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._file, data[written:], self._stop + written)
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._stop)  # takes no room
            raise
        self._stop += len(data)
        if self._packed:
            settle(self.path.parent)
            packed_path(self.path).unlink()
            settle(self.path.parent)
            self._waiting, self._packed = b"", False

    def close(self, whole: bool = False) -> None:
        """Let others write; pack what is whole and large.

        Raises:
            OSError: if there is no room to pack it; it stays plain then.
        """
        try:
            if self._packed:
                self.path.unlink(missing_ok=True)  # nothing was appended
            elif whole:
                pack_large(self.path)
        finally:
            os.close(self._file)


def _locked(path: Path) -> int:
    """The file, made if it is not there, opened for nobody else."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise InputError(f"another process is writing to {path}. Wait for it, or give another --out.") from None
        if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
            return file
        os.close(file)  # another process packed it between the two steps


def whole_lines(path: Path) -> bytes:
    """The lines of a file that were finished, plain or packed.

    Raises:
        OSError: if it is not there or cannot be read.
        InputError: if plain and packed file do not agree.
    """
    return _whole_lines(path)[0]


def _whole_lines(path: Path) -> tuple[bytes, int, bool]:
    """The lines that were finished, how many bytes follow them, and whether they are packed. Where a kill left plain
    and packed file, one begins with the other, and the longer counts."""
    packed = _packed_lines(path)
    plain = path.read_bytes() if packed is None or path.exists() else b""
    if packed is not None and packed.startswith(plain):
        return packed, 0, True
    if packed is not None and not plain.startswith(packed):
        raise InputError(
            f"{path} and {packed_path(path).name} beside it differ. Keep the one that you want and remove the other."
        )
    stop = plain.rfind(b"\n") + 1
    return plain[:stop], len(plain) - stop, False


def _packed_lines(path: Path) -> bytes | None:
    try:
        return unpacked(packed_path(path))
    except FileNotFoundError:
        return None
