"""The heaps of both processes, which large bodies and prompts come and go through."""

from __future__ import annotations

import ctypes
from contextlib import suppress

MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc
LARGE_BYTES = 1 << 18


def return_large_blocks() -> None:
    """Let large blocks go back to the system when they are freed. By default glibc moves them to its heap once one was
    freed, where small blocks keep them: the process then grows with every body of megabytes. Other C libraries are
    left alone."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, LARGE_BYTES)


def trim() -> None:
    """Return what is free inside the heap, in some milliseconds."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
