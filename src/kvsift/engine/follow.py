"""Waiting for the answers of rows, as the clients of the loop do."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from queue import SimpleQueue

from kvsift.engine.loop import Loop
from kvsift.engine.row import Row
from kvsift.engine.transcript import TextOutput
from kvsift.errors import InputError


def follow(loop: Loop, rows: Sequence[Row], outputs: Sequence[TextOutput]) -> Iterator[tuple[int, str]]:
    """Submit rows, and wait until they have ended; yields (index of the row, piece of its text), and "" when more was
    read.

    Leaving the iterator ends the rows. A row that fails ends with its ``error``, and the others go on.
    """
    if loop.is_own_thread:
        raise RuntimeError(
            "the engine was asked in its own thread, by something that it calls; it would wait for itself."
        )
    loop.start()
    news: SimpleQueue[tuple[int, str | None]] = SimpleQueue()  # index of a row, and a piece; None: it has ended
    for index, (row, output) in enumerate(zip(rows, outputs)):
        output.tell = partial(_put, news, index)
        row.on_end = partial(_put, news, index, None)
    coming, num_running = deque(rows), 0
    try:
        while coming or num_running:
            try:
                while coming:
                    loop.submit(coming[0])
                    coming.popleft()
                    num_running += 1
            except InputError:  # too many wait, maybe of these
                if not num_running:
                    raise
            index, piece = news.get()
            if piece is None:
                num_running -= 1
                piece = _end(rows[index], outputs[index])
                if not piece:
                    continue
            yield index, piece
    finally:
        for row in rows:
            loop.cancel(row)


def _put(news: SimpleQueue[tuple[int, str | None]], index: int, piece: str | None) -> None:
    news.put((index, piece))


def _end(row: Row, output: TextOutput) -> str:
    """The last text of a row that has ended."""
    if row.error is not None:
        return ""
    try:
        return output.transcript.end(row.finish_reason)
    except Exception as error:  # of this row alone
        row.error = error
        return ""
