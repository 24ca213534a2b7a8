"""Generation after prompts, and the answer that it ends with."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any

import torch

from kvsift import native
from kvsift.api.answer import Answer
from kvsift.api.passages import passages_of
from kvsift.engine.follow import follow
from kvsift.engine.loop import Loop
from kvsift.engine.memory import peak_bytes
from kvsift.engine.model_runner import ModelRunner
from kvsift.engine.options import ProgressCallback
from kvsift.engine.request import Request
from kvsift.engine.sequence import CacheReport, EngineSequence
from kvsift.engine.speculative.exactness import exact_decoder
from kvsift.engine.transcript import TextOutput, Transcript
from kvsift.engine.uncopied import Uncopied
from kvsift.errors import Conflict
from kvsift.layer.accounting import RunStats
from kvsift.layer.paged_decode import rule_of
from kvsift.layer.selection_log import SelectionLog
from kvsift.native.shapes import supports


class Generation:
    """Answers to requests. Iterating generates, and yields (index of the request, new piece of its text).

    Args:
        runner: runner of the model, whose weights are loaded.
        loop: serves sequences.
        requests: decoded together, under one plan.
        started: time of submission.
        progress: called while prompts are prefilled.
        holds: what the loop has prefilled of prompts is kept as long as this object, for prompts that share a prefix.
    """

    def __init__(
        self, runner: ModelRunner, loop: Loop, requests: Sequence[Request], started: float,
        progress: ProgressCallback | None = None, holds: bool = False,
    ) -> None:  # fmt: skip
        self._holds = holds
        self._runner, self._loop, self._requests, self._started = runner, loop, requests, started
        self._plan = requests[0].plan
        self._total, self._progress = sum(len(request.ids) - 1 for request in requests), progress
        self._answers: dict[int, Answer] = {}
        self._errors: dict[int, BaseException] = {}  # of requests that failed
        self._seqs: list[EngineSequence] = []  # of the loop

    def close(self) -> None:
        """End all answers; any thread may."""
        for seq in self._seqs:
            self._loop.close(seq)

    @property
    def answers(self) -> list[Answer]:
        """Answers of finished requests, in their order."""
        return [answer for _, answer in sorted(self._answers.items())]

    def _settle(self, index: int, seq: EngineSequence, answer_of_it: Callable[[], Answer]) -> None:
        """Keep the answer to a request, or the error with which it has ended."""
        try:
            if seq.error is not None:
                raise seq.error
            self._answers[index] = answer_of_it()
        except Exception as error:
            self._errors[index] = error

    def _raise_error(self) -> None:
        """Raise the error of the first request that failed, if any has; with the answers of the others, if it is one of
        several."""
        errors, self._errors = [(index, self._errors[index]) for index in sorted(self._errors)], {}
        if not errors:
            return
        _, error = errors[0]
        if (count := len(self._requests)) > 1:
            failed = ", ".join(str(index + 1) for index, _ in errors)
            error.add_note(f"kvsift: of {count} prompts, these failed: {failed}. The attribute answers has the others.")
            error.answers = [self._answers.get(index) for index in range(count)]  # type: ignore[attr-defined]
        raise error

    def __iter__(self) -> Generator[tuple[int, str], None, None]:
        runner, reason = self._runner, self._runner.reason_uncaptured(self._plan)
        if reason is None and runner.fast_path.is_required:
            check_captured(self._requests)
        return self._in_sequences(reason)

    def _in_sequences(self, reason: str | None) -> Generator[tuple[int, str], None, None]:
        runner = self._runner
        # Prompts of one call are decoded together once all are prefilled, so that a captured step, which takes as long
        # for one as for several, is seldom of few. The name of the call is not this object: sequences would keep it.
        call = object() if len(self._requests) > 1 and reason is None else None
        outputs = [TextOutput(request, runner.tokenizer, runner.device) for request in self._requests]
        self._seqs = seqs = [sequence_of(runner, output, holds=self._holds, call=call) for output in outputs]
        for seq in seqs:  # their prompts are held for as long as somebody has this object, or until an earlier end
            weakref.finalize(self, self._loop.close, seq).atexit = False
        for index, piece in follow(self._loop, seqs, outputs):
            if piece:
                yield index, piece
            elif self._progress is not None:
                done = (min(output.num_prefilled, len(seq.request.ids) - 1) for output, seq in zip(outputs, seqs))
                self._progress(sum(done), self._total)
        for index, (seq, output) in enumerate(zip(seqs, outputs)):
            answer = partial(answer_of_sequence, runner, seq, output.transcript, self._started)
            self._loop.call(partial(self._settle, index, seq, answer))  # counters may be on the device
        self._raise_error()


class TextStream(Uncopied):
    """Pieces of a text as they are generated.

    Attributes:
        answer: the whole text with its numbers, after the last piece; None until then.
    """

    INSTEAD = "Its pieces come once."

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._pieces = iter(generation)
        self._is_closed = False
        self.answer: Answer | None = None

    def __iter__(self) -> Iterator[str]:
        return self

    def close(self) -> None:
        """End the answer here, as when the stream is let go of. A thread that waits for a piece gets no further one."""
        self._is_closed = True
        self._generation.close()
        with suppress(ValueError):  # such a thread is in the iterator, and ends it
            self._pieces.close()

    def __next__(self) -> str:
        if self._is_closed:
            self._pieces.close()
        try:
            return next(self._pieces)[1]
        except StopIteration:  # also after an error, without an answer
            self.answer = next(iter(self._generation.answers), None)
            raise


def check_captured(requests: Sequence[Request]) -> None:
    """Refuse requests that captured steps cannot answer (``InputError``)."""
    if any(request.offsets is not None for request in requests):
        raise Conflict(
            "captured steps keep no record of what they selected. Give path='composed', or leave out passages."
        )
    if any(request.logprobs is not None for request in requests):
        raise Conflict(
            "captured steps choose tokens on the GPU and keep no probabilities. Give path='composed', or leave out "
            "logprobs."
        )


def sequence_of(runner: ModelRunner, output: TextOutput, **options: Any) -> EngineSequence:
    """The sequence of a request for text, with options of ``EngineSequence``."""
    request = output.transcript.request
    return EngineSequence(request, output, observer=log_of(request), decoder=exact_decoder(runner, request), **options)


def log_of(request: Request) -> SelectionLog | None:
    """Return an observer of the answer to a request, if its passages are wanted."""
    return None if request.offsets is None else SelectionLog(len(request.ids))


def answer_of_sequence(runner: ModelRunner, seq: EngineSequence, transcript: Transcript, started: float) -> Answer:
    """Return the answer of a sequence that has ended."""
    of_cache = seq.report or CacheReport(seq.request.plan, RunStats(), 0, {})
    is_captured = seq.path == runner.fast_path.name
    prompt_tokens, report, rule = len(transcript.request.ids), of_cache.stats.report(), rule_of(of_cache.plan)
    # the step of a position chooses the token after it, and the next one is the first under the larger budget
    guard = [{"token": max(event["position"] + 2 - prompt_tokens, 0), **event} for event in report["guard"]]
    for event in guard:
        del event["row"]  # of a batch that the answer shares with others
    log, offsets, passages = of_cache.stats.observer, transcript.request.offsets, None
    if offsets is not None:
        log = log if isinstance(log, SelectionLog) else SelectionLog(prompt_tokens)  # of a sequence that never ran
        passages = passages_of(log, offsets, of_cache.plan)
    return Answer(
        text=transcript.text,
        token_ids=transcript.new_ids,
        prompt_tokens=prompt_tokens,
        new_prompt_tokens=prompt_tokens - seq.num_reused,
        ttft_s=(transcript.times or [perf_counter()])[0] - started,
        itl_s=transcript.itl_s,
        plan=str(transcript.request.asked or of_cache.plan),
        kv_bytes=of_cache.kv_bytes,
        peak_memory_bytes=peak_bytes(runner.device),
        stats=report,
        path=seq.path,
        host="" if is_captured else _host(runner),
        index=of_cache.index,
        dense_below=seq.dense_below if is_captured or rule is None else rule.budget.min_context,
        setup_s=seq.setup_s,
        build_s=seq.build_s,
        finish_reason=transcript.finish_reason,
        guard=guard,
        logprobs=transcript.logprobs,
        no_reuse="" if seq.prefix is not None else seq.no_reuse,
        exact=None if seq.decoder is None else seq.decoder.report.as_dict(),
        passages=passages,
    )


def _host(runner: ModelRunner) -> str:
    if runner.device.type == "cuda" and runner.placement == "device":
        return ""
    if not native.available():
        return f"plain torch: {native.why_missing()}"
    for head_dim in sorted({layer.head_dim for layer in runner.directory.full_layers}):
        sample = torch.empty(1, head_dim, dtype=runner.dtype)
        if not supports(sample, sample[None]):
            return f"plain torch: the compiled core does not take {runner.dtype} with head_dim {head_dim}"
    count = torch.get_num_threads()
    return f"compiled core, {native.level()}, {count} thread{'s' if count > 1 else ''}"
