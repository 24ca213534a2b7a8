"""Rows beside the loop, over a cache that is their client's own. They take the steps that rows of the loop take."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from kvsift.batching.exact.decoder import ExactDecoder
from kvsift.batching.exact.step import Logits, step_exactly
from kvsift.batching.row import Row
from kvsift.engine.block_groups import BlockGroup
from kvsift.engine.model_runner import ModelRunner
from kvsift.engine.options import ProgressCallback
from kvsift.engine.row_groups import CacheSession, Group, RowGroup
from kvsift.engine.rows import RunnerRows, TextOutput
from kvsift.engine.session import Session
from kvsift.engine.transcript import Transcript
from kvsift.layer.accounting import RunStats
from kvsift.methods.base import Phase
from kvsift.models.transformers import SparseCache

OpenSession = Callable[[], AbstractContextManager[Session]]


def row_beside(
    runner: ModelRunner, cache: SparseCache, transcript: Transcript, exact: ExactDecoder | None = None, place: int = 0,
    stats: RunStats | None = None,
) -> Row:  # fmt: skip
    """A row beside the loop: that at a place of a cache, with its counters if they are not those of the cache."""
    request = transcript.request
    output = TextOutput(request, runner.tokenizer, runner.device, transcript)
    most = request.max_new_tokens
    return Row(request.ids, cache.run.plan, most, output, exact=exact, cache=cache, place=place, stats=stats)


@torch.inference_mode()
def decode_beside(
    runner: ModelRunner, rows: Sequence[Row], phase: Phase = "prefill", session: OpenSession | None = None,
    in_blocks: bool = False, progress: ProgressCallback | None = None,
) -> Generator[tuple[int, str]]:  # fmt: skip
    """Feed what is not cached of the prompts of rows, one after the other, and let all generate; yields (index of the
    row, new piece of its text). A row whose token or text cannot be made ends with its ``error``, and the others go on.

    Args:
        runner: of the model.
        rows: of one cache (``row_beside``): several only in captured steps that are not of blocks.
        phase: of the prompts' tokens.
        session: opens captured steps over the cache, once every layer has attended a token; None: passes are composed.
        in_blocks: captured steps are of blocks.
        progress: called while each prompt is prefilled.
    """
    cache = rows[0].cache
    assert cache is not None
    with _decoding_exactly(cache) if in_blocks or rows[0].exact is not None else nullcontext():
        for index, row in enumerate(rows):
            if session is not None:
                cache.turn_to(row.place, row.counters)
            logits = runner.prefill(cache, row.ids[cache.get_seq_length() :], progress, phase)
            if row is rows[-1]:  # for all rows: updates are no part of a step's time, nor of what is captured
                cache.prepare()
            row.num_cached = len(row.ids)
            _tell(row, logits[0, -1], row.counters.probe_s)
            yield from _pieces(rows[index : index + 1], index)
        model = RunnerRows(runner)
        with nullcontext() if session is None else _captured(model, rows, session, in_blocks):
            while running := _running(rows):
                for part in [running] if running[0].steps is None else running[0].steps.parts(running):
                    _step(model, part)
                yield from _pieces(rows)


@contextmanager
def _captured(model: RunnerRows, rows: Sequence[Row], session: OpenSession, in_blocks: bool) -> Iterator[None]:
    """Rows that go on take captured steps."""
    with session() as steps:
        source, cache = CacheSession(steps), steps.cache
        group: Group[Any] = BlockGroup(source, cache.rotation) if in_blocks else RowGroup(source, cache.rotation)
        model.add(group)
        for row in _running(rows):
            group.join(row, _transcript(row).request)
            row.steps = group
        try:
            yield
        finally:
            for row in rows:
                _leave(row)


def _step(model: RunnerRows, rows: Sequence[Row]) -> None:
    """Let rows of a group take a step; those that have ended leave it."""
    if rows[0].exact is not None:
        step_exactly(model, rows, _choose)
    else:
        every, probe_s = model.decode_rows(rows), max(row.counters.probe_s for row in rows)  # all wait for the longest
        for row, logits in zip(rows, every):
            row.num_cached += 1
            _tell(row, logits, probe_s)
    for row in rows:
        if _is_done(row):
            _leave(row)


def _leave(row: Row) -> None:
    """End the captured steps of a row; its cache keeps what was fed, whatever was written ahead."""
    if row.steps is not None:
        launched, cache = row.steps.leave(row), row.cache
        assert cache is not None
        written, stale_from = (row.num_cached, None) if launched is None else (launched.written, launched.stale_from)
        cache.advance(row.place, written, row.num_cached, stale_from)


def _choose(row: Row, logits: Logits) -> int | None:
    row.num_cached += 1
    _tell(row, logits, row.counters.probe_s)
    return None if _is_done(row) else row.token


def _tell(row: Row, logits: Logits, probe_s: float) -> None:
    try:
        row.token, _ = row.output.take(logits, probe_s)
    except Exception as error:
        row.error = error


def _is_done(row: Row) -> bool:
    return row.error is not None or _transcript(row).done


def _running(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if not _is_done(row)]


def _transcript(row: Row) -> Transcript:
    assert isinstance(row.output, TextOutput)
    return row.output.transcript


def _pieces(rows: Sequence[Row], first: int = 0) -> Iterator[tuple[int, str]]:
    """Text that the outputs of rows have not given yet, by the index of each; the first one has the index ``first``."""
    for index, row in enumerate(rows, first):
        assert isinstance(row.output, TextOutput)
        yield from ((index, piece) for piece in row.output.take_pieces())


@contextmanager
def _decoding_exactly(cache: SparseCache) -> Iterator[None]:
    """Generated tokens of a cache are attended to everything, and not probed."""
    every, cache.run.exact, cache.stats.probe_every = cache.stats.probe_every, "dense", 0
    try:
        yield
    finally:
        cache.run.exact, cache.stats.probe_every = "", every
