"""Locks that an interrupt leaves taken by nobody.

Python delivers an interrupt between two of its own steps, or in a lock of C that waits, which then is not taken. So
``with`` on a lock of C is safe: what takes the lock enters the block. A lock of Python, or the result of ``acquire`` on
its way into an ``if``, is not.
"""

from __future__ import annotations

from _thread import RLock
from threading import Lock
from typing import Any


class PoolLock(RLock):  # type: ignore[misc]  # final for type checkers alone
    """A reentrant lock; the copy of what it guards gets a lock of its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> PoolLock:
        return PoolLock()


def take(lock: Lock, taken: list[bool], timeout_s: float = 0.0) -> bool:
    """Acquire a lock, and have ``taken`` say so in the same step; whether it was acquired.

    The caller begins ``try`` before, and in ``finally`` releases the lock if ``taken`` holds anything.
    """
    taken += filter(None, map(lock.acquire, (True,), (timeout_s,)))
    return bool(taken)
