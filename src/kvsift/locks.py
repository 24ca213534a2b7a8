"""The lock of a pool, which a copy of the pool does not share."""

from __future__ import annotations

from _thread import RLock
from typing import Any


class PoolLock(RLock):  # type: ignore[misc]  # final for type checkers alone
    """A reentrant lock; the copy of what it guards gets a lock of its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> PoolLock:
        return PoolLock()
