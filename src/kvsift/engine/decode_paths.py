"""The two decode paths of prompts: composed of forward passes, and captured steps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from time import perf_counter

import torch

from kvsift.batching.exact.decoder import ExactDecoder
from kvsift.batching.exact.step import Logits, step_exactly
from kvsift.batching.row import Row
from kvsift.engine.accounting import DecodeRow
from kvsift.engine.block_groups import BlockGroup
from kvsift.engine.captured_rows import CapturedRows
from kvsift.engine.model_runner import ModelRunner
from kvsift.engine.options import ProgressCallback
from kvsift.engine.row_groups import CacheSession
from kvsift.engine.rows import RunnerRows, TextOutput
from kvsift.engine.session import Session
from kvsift.engine.transcript import Transcript
from kvsift.layer.accounting import RunStats
from kvsift.layer.paged_decode import rule_of
from kvsift.methods.base import Phase
from kvsift.models.transformers import SparseCache


class CapturedDecode:
    """Rows of a cache on the captured path. Iterating prefills and generates; yields (row, new piece of its text).

    Args:
        runner: of the model.
        cache: its rows are fed one by one; some tokens of a prompt may be cached.
        rows: transcripts without a token yet, and the counters of each.
        session: opens captured steps over the cache, once every layer has attended a token.
        phase: of the prompts' tokens.
        progress: called while each prompt is prefilled.

    Attributes:
        setup_s: seconds spent on capturing steps and measuring the crossover.
        dense_below: steps were dense in contexts shorter than this.
        rows: that decode, by number.
    """

    def __init__(
        self, runner: ModelRunner, cache: SparseCache, rows: Sequence[tuple[Transcript, RunStats]],
        session: Callable[[], AbstractContextManager[Session]], phase: Phase = "prefill",
        progress: ProgressCallback | None = None,
    ) -> None:  # fmt: skip
        self._runner, self._cache, self._answers, self._session = runner, cache, rows, session
        self._phase, self._progress = phase, progress
        self.setup_s, self.dense_below = 0.0, 0
        self.rows: dict[int, DecodeRow] = {}

    def __iter__(self) -> Iterator[tuple[int, str]]:
        for number, (transcript, stats) in enumerate(self._answers):
            self._cache.turn_to(number, stats)
            pieces = first_token(self._runner, self._cache, transcript, self._phase, self._progress)
            yield from ((number, piece) for piece in pieces)
            if not transcript.done:
                self.rows[number] = self._row(number, transcript, stats)
        self._cache.prepare()  # no thread is left that could synchronise while steps are captured
        with self._session() as session:
            captured = CapturedRows(session)
            try:
                yield from self._decode(captured)
            finally:
                for row in self.rows.values():
                    if not row.done:
                        captured.leave(row)
                self.setup_s, self.dense_below = captured.setup_s, captured.dense_below

    def _row(self, number: int, transcript: Transcript, stats: RunStats) -> DecodeRow:
        cache, request = self._cache, transcript.request
        start, most, guard = len(request.ids), request.max_new_tokens - 1, cache.run.guards.of(number)
        rule, token = rule_of(cache.run.plan), transcript.new_ids[-1]
        row = DecodeRow(cache, number, stats, start, most, token, rule, request.sampling, guard)
        tallies = [tally for (_, phase), tally in stats.tallies.items() if phase == "decode"]
        row.sparse_steps = max((tally.sparse_queries for tally in tallies), default=0)
        return row

    def _decode(self, captured: CapturedRows) -> Iterator[tuple[int, str]]:
        while running := [row for row in self.rows.values() if not row.done]:
            tokens, pieces = captured.step(running), list[tuple[int, str]]()
            time = perf_counter() - max(row.stats.probe_s for row in running)  # all have waited for the longest
            for row, token in zip(running, tokens):
                transcript = self._answers[row.row][0]
                pieces.append((row.row, transcript.take(token, time)))
                if transcript.done:
                    captured.leave(row)
            yield from ((number, piece) for number, piece in pieces if piece)


@torch.inference_mode()
def first_token(
    runner: ModelRunner, cache: SparseCache, transcript: Transcript, phase: Phase = "prefill",
    progress: ProgressCallback | None = None,
) -> Iterator[str]:  # fmt: skip
    """Feed the tokens of a prompt that are not cached, and choose the token that follows."""
    request = transcript.request
    logits = runner.prefill(cache, request.ids[cache.get_seq_length() :], progress, phase)
    token = request.sampling.chooser(runner.device)(logits[0, -1])
    piece = transcript.take(token, perf_counter() - cache.stats.probe_s, logits[0, -1])
    if piece:
        yield piece


def row_of(runner: ModelRunner, cache: SparseCache, transcript: Transcript, exact: ExactDecoder | None) -> Row:
    """A row beside the loop, over a cache of its own."""
    request = transcript.request
    output = TextOutput(request, runner.tokenizer, runner.device, transcript)
    return Row(request.ids, cache.run.plan, request.max_new_tokens, output, exact=exact, cache=cache)


@torch.inference_mode()
def decode_exactly(
    runner: ModelRunner, row: Row, phase: Phase, session: Callable[[], AbstractContextManager[Session]] | None = None
) -> Generator[str]:
    """Feed what is not cached of the prompt of a row (``row_of``), then generate the tokens of dense decoding.

    Args:
        runner: of the model.
        row: an exact one, or a dense one that takes steps of blocks.
        phase: of the prompt's tokens.
        session: opens captured steps, once every layer has attended a token; None: passes are composed.
    """
    cache, output, model = row.cache, row.output, RunnerRows(runner)
    assert cache is not None
    assert isinstance(output, TextOutput)

    def tell(row: Row, logits: Logits) -> int | None:
        row.token, reason = output.take(logits, cache.stats.probe_s)
        return None if reason else row.token

    with decoding_exactly(cache):
        logits = runner.prefill(cache, row.ids[cache.get_seq_length() :], phase=phase)
        cache.prepare()
        row.num_cached = len(row.ids)
        tell(row, logits[0, -1])
        yield from output.take_pieces()
        with ExitStack() as stack:
            if session is not None and not output.transcript.done:
                group = BlockGroup(CacheSession(stack.enter_context(session())), cache.rotation)
                group.join(row, output.transcript.request)
                stack.callback(group.leave, row)
                row.steps = group
                model.add(group)
            while not output.transcript.done:
                if row.exact is not None:
                    step_exactly(model, [row], tell)
                else:
                    [token] = model.decode_rows([row])
                    row.num_cached += 1
                    tell(row, token)
                yield from output.take_pieces()


@contextmanager
def decoding_exactly(cache: SparseCache) -> Iterator[None]:
    """Generated tokens of a cache are attended to everything, and not probed."""
    every, cache.run.is_exact, cache.stats.probe_every = cache.stats.probe_every, True, 0
    try:
        yield
    finally:
        cache.run.is_exact, cache.stats.probe_every = False, every


@torch.inference_mode()
def decode_composed(
    runner: ModelRunner, cache: SparseCache, transcript: Transcript, phase: Phase = "prefill"
) -> Generator[str]:
    """Feed the tokens of a prompt that are not cached, then generate, with a forward pass for each token."""
    request = transcript.request
    choose = request.sampling.chooser(runner.device)
    logits = runner.prefill(cache, request.ids[cache.get_seq_length() :], phase=phase)
    cache.prepare()  # updates after these tokens are no part of the first step's time
    while True:
        token = choose(logits[0, -1])
        piece = transcript.take(token, perf_counter() - cache.stats.probe_s, logits[0, -1])
        if piece:
            yield piece
        if transcript.done:
            return
        logits = runner.prefill(cache, [token], phase="decode")
