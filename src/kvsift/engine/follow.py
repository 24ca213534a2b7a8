"""Waiting for the answers of sequences, as the clients of the loop do."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from queue import SimpleQueue

from kvsift.engine.loop import Loop
from kvsift.engine.sequence import EngineSequence
from kvsift.engine.transcript import TextOutput
from kvsift.errors import InputError, Unavailable


def follow(loop: Loop, seqs: Sequence[EngineSequence], outputs: Sequence[TextOutput]) -> Iterator[tuple[int, str]]:
    """Submit sequences, and wait until they have ended; yields (index of the sequence, piece of its text), and "" when
    more was read.

    Leaving the iterator ends the sequences. A sequence that fails ends with its ``error``, and the others go on.

    Raises:
        InputError: if they cannot be submitted, or the engine is stopped before they have ended.
    """
    if loop.is_own_thread:
        raise RuntimeError(
            "the engine was asked in its own thread, by something that it calls; it would wait for itself."
        )
    loop.start()
    news: SimpleQueue[tuple[int, str | None]] = SimpleQueue()  # index of a sequence, and a piece; None: it has ended
    for index, (seq, output) in enumerate(zip(seqs, outputs)):
        output.notify = partial(_put, news, index)
        seq.on_end = partial(_put, news, index, None)
    coming, num_running = deque(seqs), 0
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
                if seqs[index].finish_reason == "cancelled":
                    raise Unavailable("this LLM was closed before the answer ended. Make another one.")
                piece = _end(seqs[index], outputs[index])
                if not piece:
                    continue
            yield index, piece
    finally:
        for seq in seqs:
            loop.cancel(seq)


def _put(news: SimpleQueue[tuple[int, str | None]], index: int, piece: str | None) -> None:
    news.put((index, piece))


def _end(seq: EngineSequence, output: TextOutput) -> str:
    """The last text of a sequence that has ended."""
    if seq.error is not None:
        return ""
    try:
        return output.transcript.end(seq.finish_reason)
    except Exception as error:  # of this sequence alone
        seq.error = error
        return ""
