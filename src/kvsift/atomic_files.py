"""Atomic writes: files stay valid after a full disk, a killed process or a power cut. And where a user's cache is."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_ident
from typing import BinaryIO


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file as a whole and flush it to the disk; an error leaves the old file."""
    with replacement(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacement(path: Path) -> Iterator[BinaryIO]:
    """Yield an empty file that replaces ``path`` when the block ends, and is removed if the block fails."""
    partial = path.with_name(f"{path.name}.{os.getpid()}-{get_ident()}.partial")  # several may write at once
    try:
        with partial.open("wb") as file:
            yield file
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


def user_cache() -> Path:
    """Return kvsift's folder in the user's cache, which may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvsift"
