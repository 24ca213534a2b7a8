"""Answers to prompts, piece by piece, on either path: through transformers, or by captured steps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from kvsift import native
from kvsift.engine.counting import Row
from kvsift.engine.decode_loop import DecodeLoop
from kvsift.engine.fast_path import in_turns
from kvsift.engine.memory import peak_bytes
from kvsift.engine.result import Answer
from kvsift.engine.session import Session
from kvsift.engine.transcript import Request, Transcript
from kvsift.methods.base import Phase
from kvsift.models.transformers import SparseCache
from kvsift.native.takes import takes
from kvsift.runtime.paged_decode import rule_of
from kvsift.runtime.plan import Plan
from kvsift.runtime.stats import RunStats

if TYPE_CHECKING:
    from kvsift.engine.llm import LLM

Progress = Callable[[int, int], None]  # tokens prefilled so far, tokens to prefill


class Generation:
    """Answers to requests. Iterating generates, and yields (index of the request, text that can be shown).

    Args:
        llm: the model, loaded.
        plan: how to sift.
        requests: together where the steps are captured, else one after the other.
        started: when the user asked.
        progress: called while prompts are prefilled.
    """

    def __init__(
        self, llm: LLM, plan: Plan, requests: Sequence[Request], started: float, progress: Progress | None = None
    ) -> None:
        self._llm, self._plan, self._requests, self._started = llm, plan, requests, started
        self._total, self._done, self._progress = sum(len(request.ids) - 1 for request in requests), 0, progress
        self._answers: dict[int, Answer] = {}

    @property
    def answers(self) -> list[Answer]:
        """Those of finished requests, in their order."""
        return [answer for _, answer in sorted(self._answers.items())]

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return in_turns(self._llm.fast_path.turn, self._pieces())

    def _pieces(self) -> Generator[tuple[int, str], None, None]:
        reason = self._llm.fast_path.reason_against(self._plan, self._llm.model)
        if reason is None:
            for indices in self._alike():
                yield from self._captured(indices)
            return
        for index, request in enumerate(self._requests):
            yield from ((index, piece) for piece in self._composed(index, request, reason))

    def _alike(self) -> Iterable[list[int]]:
        """Requests that can share a cache, since RoPE rotates them alike; nearly always that is all."""
        groups: dict[int | None, list[int]] = {}
        for index, request in enumerate(self._requests):
            groups.setdefault(self._llm.rotation(request.length), []).append(index)
        return groups.values()

    def _composed(self, index: int, request: Request, reason: str) -> Iterator[str]:
        llm = self._llm
        reserve = len(request.ids) + request.max_new_tokens
        cache = llm.new_cache(llm.composed_plan(self._plan), reserve, length=request.length)
        transcript = Transcript(request, llm.tokenizer)
        llm.prefill(cache, request.ids[:-1], self._told)
        cache.prepare()
        self._done += len(request.ids) - 1
        yield from decode_composed(llm, cache, transcript)
        self._answers[index] = answer_of(llm, cache, transcript, self._started, len(request.ids), path=reason)

    def _captured(self, indices: Sequence[int]) -> Iterator[tuple[int, str]]:
        llm, requests = self._llm, [self._requests[index] for index in indices]
        fast = llm.fast_path
        cache, kept = fast.take(llm, self._plan, requests)
        rows = []
        for row, request in enumerate(requests):
            stats, transcript = RunStats(llm.probe_every), Transcript(request, llm.tokenizer)
            cache.turn_to(row, stats)
            yield from ((indices[row], piece) for piece in first_token(llm, cache, transcript, progress=self._told))
            self._done += len(request.ids) - 1
            rows.append(Row(row, transcript, stats, len(request.ids)))
        session = fast.session(llm.model, cache, kept)
        loop = DecodeLoop(session, rows, rule_of(self._plan))
        try:
            yield from ((indices[row], piece) for row, piece in loop)
        finally:
            fast.keep(session)
        self._answers |= {
            index: answer_of(llm, cache, row.transcript, self._started, row.start, stats=row.stats, loop=loop)
            for index, row in zip(indices, rows)
        }

    def _told(self, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(min(self._done + done, self._total), self._total)


@torch.inference_mode()
def first_token(
    llm: LLM, cache: SparseCache, transcript: Transcript, phase: Phase = "prefill", progress: Progress | None = None
) -> Iterator[str]:
    """Feed what the cache lacks of a prompt and choose the token that follows."""
    request = transcript.request
    logits = llm.prefill(cache, request.ids[cache.get_seq_length() :], progress, phase)
    token = request.sampling.chooser(llm.device)(logits[0, -1])
    piece = transcript.take(token, perf_counter() - cache.stats.probe_s)
    if piece:
        yield piece


@torch.inference_mode()
def decode_composed(llm: LLM, cache: SparseCache, transcript: Transcript, phase: Phase = "prefill") -> Iterator[str]:
    """Feed what the cache lacks of a prompt, then generate, a forward pass for each token."""
    request = transcript.request
    choose = request.sampling.chooser(llm.device)
    logits = llm.prefill(cache, request.ids[cache.get_seq_length() :], phase=phase)
    cache.prepare()  # what these tokens have outdated is no part of the first step's time
    while True:
        token = choose(logits[0, -1])
        piece = transcript.take(token, perf_counter() - cache.stats.probe_s)
        if piece:
            yield piece
        if transcript.done:
            return
        logits = llm.prefill(cache, [token], phase="decode")


def decode_captured(
    cache: SparseCache, session: Session, transcript: Transcript, loops: list[DecodeLoop]
) -> Iterator[str]:
    """Generate after a first token, by captured steps over the only row of a cache; what was fed stays cached."""
    layers = [tally.sparse_queries for (_, phase), tally in cache.stats.tallies.items() if phase == "decode"]
    row = Row(0, transcript, cache.stats, cache.get_seq_length(), sparse_steps=max(layers, default=0))
    loop = DecodeLoop(session, [row], rule_of(cache.run.plan))
    loops.append(loop)
    try:
        yield from (piece for _, piece in loop)
    finally:
        cache.advance(0, row.written, row.start + row.steps, row.stale_from)


def answer_of(
    llm: LLM, cache: SparseCache, transcript: Transcript, started: float, prompt_tokens: int, *,
    new_prompt_tokens: int | None = None, stats: RunStats | None = None, loop: DecodeLoop | None = None,
    path: str = "", build_s: float = 0.0,
) -> Answer:  # fmt: skip
    """A finished transcript with its numbers."""
    return Answer(
        text=transcript.text,
        token_ids=transcript.new_ids,
        prompt_tokens=prompt_tokens,
        new_prompt_tokens=prompt_tokens if new_prompt_tokens is None else new_prompt_tokens,
        ttft_s=transcript.times[0] - started,
        itl_s=transcript.itl_s,
        plan=str(cache.run.plan),
        kv_bytes=cache.num_bytes,
        peak_memory_bytes=peak_bytes(llm.device),
        stats=(cache.stats if stats is None else stats).report(),
        path=llm.fast_path.name if loop is not None else f"composed: {path}",
        host="" if loop is not None else _host(llm),
        index=cache.describe(),
        dense_below=0 if loop is None else loop.dense_below,
        setup_s=0.0 if loop is None else loop.setup_s,
        build_s=build_s,
        finish_reason=transcript.finish_reason,
    )


def _host(llm: LLM) -> str:
    if llm.device.type == "cuda" and llm.placement == "device":
        return ""
    if not native.available():
        return f"plain torch: {native.why_missing()}"
    config = llm.directory.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sample = torch.empty(1, head_dim, dtype=llm.dtype)
    if not takes(sample, sample[None]):
        return f"plain torch: the compiled core does not take {llm.dtype} with head_dim {head_dim}"
    return f"compiled core, {native.level()}, {torch.get_num_threads()} threads"
