"""Pauses in a chunk of a prompt, in which sequences that decode get a token."""

from __future__ import annotations

from collections.abc import Callable

PAUSE_S = 0.1  # of a chunk, between two pauses


class Pauses:
    """Pauses of one chunk: no sequence waits longer for its next token than for ``PAUSE_S`` and a layer.

    The chunk is computed as it would be without them. What decoding is owed for it beyond these tokens comes after it.

    Args:
        clock: seconds.
        pause: does something else; returns whether there was anything.

    Attributes:
        seconds: total of all pauses.
    """

    def __init__(self, clock: Callable[[], float], pause: Callable[[], bool]) -> None:
        self._clock, self._pause, self._since = clock, pause, clock()
        self.seconds = 0.0

    def __call__(self) -> bool:
        """Pause, if the last time is long enough ago."""
        started = self._clock()
        if started - self._since < PAUSE_S:
            return False
        try:
            return self._pause()
        finally:
            self._since = self._clock()
            self.seconds += self._since - started
