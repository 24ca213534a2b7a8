"""Atomic writes: files stay valid after a full disk, a killed process or a power cut."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file as a whole and flush it to the disk; an error leaves the old file."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        settle(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def settle(folder: Path) -> None:
    """Flush the list of files of a folder to the disk."""
    opened = os.open(folder, os.O_RDONLY)
    with suppress(OSError):  # not supported by some network disks
        os.fsync(opened)
    os.close(opened)


def reason(error: OSError) -> str:
    """Return the reason of a failed write in plain words."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "the disk is full"
    return f"writing failed ({error.strerror})"
