"""Captured steps of several prompts over a cache of their own, beside those of the loop."""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager

from kvsift.engine.graphs.sequence_groups import CacheSession, SequenceGroup
from kvsift.engine.graphs.session import Session
from kvsift.engine.model_runner import ModelRunner
from kvsift.engine.sequence import Sequence
from kvsift.engine.transcript import TextOutput, Transcript
from kvsift.layer.accounting import RunStats
from kvsift.models.hf.sparse import SparseCache

OpenSession = Callable[[], AbstractContextManager[Session]]
Progress = Callable[[int, int, int], None]


def sequence_in_slot(
    runner: ModelRunner, cache: SparseCache, transcript: Transcript, place: int, stats: RunStats
) -> Sequence:
    """A sequence at a place of a cache of several sequences, with counters of its own."""
    request = transcript.request
    output = TextOutput(request, runner.tokenizer, runner.device, transcript)
    return Sequence(request, output, cache=cache, place=place, stats=stats)


def decode_in_slots(
    runner: ModelRunner, seqs: abc.Sequence[Sequence], open_session: OpenSession
) -> Generator[tuple[int, str]]:  # fmt: skip
    """Prefill the prompts of sequences, one after the other, and let all generate; yields (index of the sequence, new
    piece of its text), empty after a chunk of its prompt and after a step. A sequence whose token or text cannot be
    made ends with its ``error``, and the others go on.

    Args:
        runner: of the model.
        seqs: of one cache (``sequence_in_slot``).
        open_session: opens captured steps over the cache, once every layer has attended a token.
    """
    cache, pieces = seqs[0].cache, deque[tuple[int, str]]()
    assert cache is not None
    for index, seq in enumerate(seqs):
        assert isinstance(seq.output, TextOutput)
        seq.output.notify = lambda piece, index=index: pieces.append((index, piece))
        cache.turn_to(seq.place, seq.counters)
        for start in range(0, len(seq.request.ids), runner.chunk_size):
            logits = runner.feed(cache, seq.request.ids[start : start + runner.chunk_size])
            seq.num_cached = cache.get_seq_length()
            yield index, ""
        if seq is seqs[-1]:  # for all sequences: updates are no part of a step's time, nor of what is captured
            cache.prepare()
        _take(seq, logits[0, -1], seq.counters.probe_s)
        yield from _fetched(pieces)
    with open_session() as steps:
        group = SequenceGroup(CacheSession(steps), steps.cache.rotation)
        for seq in _running(seqs):
            group.join(seq)
            seq.steps = group
        try:
            while running := _running(seqs):
                for part in group.parts(running):
                    every, probe_s = group.step(part), max(seq.counters.probe_s for seq in part)
                    for seq, token in zip(part, every):  # all wait for the longest probe
                        seq.num_cached += 1
                        _take(seq, token, probe_s)
                        if _is_done(seq):
                            _leave(seq, group)
                yield from _fetched(pieces)
                yield 0, ""
        finally:
            for seq in seqs:
                _leave(seq, group)


def _fetched(pieces: deque[tuple[int, str]]) -> Generator[tuple[int, str]]:
    while pieces:
        yield pieces.popleft()


def _leave(seq: Sequence, group: SequenceGroup) -> None:
    """End the captured steps of a sequence; its cache keeps what was fed, whatever was written ahead."""
    if seq.steps is not None:
        launched, cache = group.leave(seq), seq.cache
        assert cache is not None
        written, stale_from = (seq.num_cached, None) if launched is None else (launched.written, launched.stale_from)
        cache.advance(seq.place, written, seq.num_cached, stale_from)


def _take(seq: Sequence, logits: object, probe_s: float) -> None:
    try:
        seq.token, _ = seq.output.take(logits, probe_s)  # type: ignore[arg-type]
    except Exception as error:
        seq.error = error


def _is_done(seq: Sequence) -> bool:
    return seq.error is not None or _transcript(seq).done


def _running(seqs: abc.Sequence[Sequence]) -> list[Sequence]:
    return [seq for seq in seqs if not _is_done(seq)]


def _transcript(seq: Sequence) -> Transcript:
    assert isinstance(seq.output, TextOutput)
    return seq.output.transcript
