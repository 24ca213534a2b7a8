"""Captured steps of several prompts over a cache of their own, beside those of the loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager

from kvsift.engine.graphs.row_groups import CacheSession, RowGroup
from kvsift.engine.graphs.session import Session
from kvsift.engine.model_runner import ModelRunner
from kvsift.engine.row import Row
from kvsift.engine.transcript import TextOutput, Transcript
from kvsift.layer.accounting import RunStats
from kvsift.models.hf.sparse import SparseCache

OpenSession = Callable[[], AbstractContextManager[Session]]
Progress = Callable[[int, int, int], None]


def row_in_slot(runner: ModelRunner, cache: SparseCache, transcript: Transcript, place: int, stats: RunStats) -> Row:
    """A row at a place of a cache of several rows, with counters of its own."""
    request = transcript.request
    output = TextOutput(request, runner.tokenizer, runner.device, transcript)
    return Row(request, output, cache=cache, place=place, stats=stats)


def decode_in_slots(
    runner: ModelRunner, rows: Sequence[Row], open_session: OpenSession
) -> Generator[tuple[int, str]]:  # fmt: skip
    """Prefill the prompts of rows, one after the other, and let all generate; yields (index of the row, new piece of
    its text), empty after a chunk of its prompt and after a step. A row whose token or text cannot be made ends with
    its ``error``, and the others go on.

    Args:
        runner: of the model.
        rows: of one cache (``row_in_slot``).
        open_session: opens captured steps over the cache, once every layer has attended a token.
    """
    cache, pieces = rows[0].cache, deque[tuple[int, str]]()
    assert cache is not None
    for index, row in enumerate(rows):
        assert isinstance(row.output, TextOutput)
        row.output.tell = lambda piece, index=index: pieces.append((index, piece))
        cache.turn_to(row.place, row.counters)
        for start in range(0, len(row.request.ids), runner.chunk_size):
            logits = runner.prefill(cache, row.request.ids[start : start + runner.chunk_size])
            row.num_cached = cache.get_seq_length()
            yield index, ""
        if row is rows[-1]:  # for all rows: updates are no part of a step's time, nor of what is captured
            cache.prepare()
        _take(row, logits[0, -1], row.counters.probe_s)
        yield from _fetched(pieces)
    with open_session() as steps:
        group = RowGroup(CacheSession(steps), steps.cache.rotation)
        for row in _running(rows):
            group.join(row)
            row.steps = group
        try:
            while running := _running(rows):
                for part in group.parts(running):
                    every, probe_s = group.step(part), max(row.counters.probe_s for row in part)
                    for row, token in zip(part, every):  # all wait for the longest probe
                        row.num_cached += 1
                        _take(row, token, probe_s)
                        if _is_done(row):
                            _leave(row, group)
                yield from _fetched(pieces)
                yield 0, ""
        finally:
            for row in rows:
                _leave(row, group)


def _fetched(pieces: deque[tuple[int, str]]) -> Generator[tuple[int, str]]:
    while pieces:
        yield pieces.popleft()


def _leave(row: Row, group: RowGroup) -> None:
    """End the captured steps of a row; its cache keeps what was fed, whatever was written ahead."""
    if row.steps is not None:
        launched, cache = group.leave(row), row.cache
        assert cache is not None
        written, stale_from = (row.num_cached, None) if launched is None else (launched.written, launched.stale_from)
        cache.advance(row.place, written, row.num_cached, stale_from)


def _take(row: Row, logits: object, probe_s: float) -> None:
    try:
        row.token, _ = row.output.take(logits, probe_s)  # type: ignore[arg-type]
    except Exception as error:
        row.error = error


def _is_done(row: Row) -> bool:
    return row.error is not None or _transcript(row).done


def _running(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if not _is_done(row)]


def _transcript(row: Row) -> Transcript:
    assert isinstance(row.output, TextOutput)
    return row.output.transcript
