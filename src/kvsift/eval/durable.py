"""Files that a full disk, a killed process or a power cut leaves valid."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """A file that is the old one or the new one, never half of either, and on the disk when this returns."""
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
    """Put on the disk which files a folder has."""
    opened = os.open(folder, os.O_RDONLY)
    with suppress(OSError):  # some network disks cannot
        os.fsync(opened)
    os.close(opened)


def reason(error: OSError) -> str:
    """What went wrong in writing, in plain words."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "the disk is full"
    return f"writing failed ({error.strerror})"
