"""Structures that decode needs, built in a background thread while the layers above read the last chunk."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from kvsift.stores.background import submit


class Preparation:
    """The preparation of one layer: requested, started once the next chunk is attended, and waited for."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None

    def request(self, thread: ThreadPoolExecutor) -> None:
        """Start in this thread at the next call of ``start``."""
        self._thread = thread

    def start(self, prepare: Callable[[], None]) -> None:
        """Start what was requested, if anything was."""
        if self._thread is not None:
            thread, self._thread = self._thread, None
            self._running = submit(prepare, thread)

    def wait(self) -> bool:
        """Wait for what was started; whether anything was."""
        running, self._running = self._running, None
        if running is None:
            return False
        running.result()
        return True
