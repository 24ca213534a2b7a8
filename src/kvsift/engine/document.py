"""A document that is prefilled once and asked many times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvsift.engine.decode_loop import DecodeLoop
from kvsift.engine.generation import (
    Progress,
    answer_of,
    decode_captured,
    decode_composed,
    first_token,
)
from kvsift.engine.prompt import require_text
from kvsift.engine.result import Answer
from kvsift.engine.sampling import Sampling
from kvsift.engine.session import Session, row_lengths
from kvsift.engine.transcript import Transcript
from kvsift.errors import InputError, unknown
from kvsift.methods.base import Phase
from kvsift.models.transformers import PlanSpec, SparseCache
from kvsift.runtime.plan import PHASES, Plan
from kvsift.runtime.sequence import DEFAULT_PAGE_SIZE
from kvsift.runtime.spec import parse_plan

if TYPE_CHECKING:
    from kvsift.engine.llm import LLM


class Document:
    """A prefilled context. Every question starts from the same cache and leaves it as it was.

    Threads may share it; their questions are answered one after the other.

    Args:
        llm: the model that reads it.
        ids: the tokens that all questions share.
        encode: the whole prompt of a question, which begins with ``ids``.
        plan: unless a question brings its own.
        progress: called while the document is prefilled, which happens with the first question.
        stop: text that ends an answer to ``ask``.
    """

    def __init__(
        self,
        llm: LLM,
        ids: list[int],
        encode: Callable[[str], list[int]],
        plan: Plan,
        progress: Progress | None = None,
        stop: str | None = None,
    ) -> None:
        self._llm, self._ids, self._encode, self._plan, self._progress = llm, ids, encode, plan, progress
        self._stop = stop
        self._cache: SparseCache | None = None
        self._session: Session | None = None  # captured steps over the cache
        self._lock, self._asked_by = Lock(), 0
        self.read_s = self._build_s = 0.0  # reading; what the last call of ``prefill`` built for decode
        self.read_stats: dict[str, Any] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens that all questions share."""
        return len(self._ids)

    def check(self, question: str, max_new_tokens: int, plan: PlanSpec = None) -> list[int]:
        """Refuse a question that cannot be asked, before the weights are loaded.

        Returns:
            Its whole prompt.

        Raises:
            InputError: if it is empty, longer than the document, or makes the prompt too long.
        """
        if not question.strip():
            raise InputError("the question is empty.")
        require_text(question, "question")
        asked = len(self._llm.tokenizer(question, add_special_tokens=False, verbose=False)["input_ids"])
        if asked > self.num_tokens:
            raise InputError(
                f"the question has {asked} tokens and the context only {self.num_tokens}. Were they swapped? The long "
                "text is the context."
            )
        ids = self._encode(question)
        if ids[: self.num_tokens] != self._ids:
            raise InputError(
                f"the tokenizer joins the question {question.strip()[:40]!r} with the end of the document. Begin it "
                "with a word."
            )
        self._llm.check([ids], max_new_tokens, self._plan if plan is None else plan)
        return ids

    def prefill(self, plan: Plan, more: int | None = None) -> SparseCache:
        """The cache of the document under a plan, for ``more`` tokens after it; read again only if the plan prefills
        differently, if the last answer has dropped a part of it for good (evict=true), or if RoPE rotates a sequence of
        this length otherwise. None: nothing will be fed, so any rotation will do."""
        self._llm.load()
        fast = self._llm.fast_path.reason_against(plan, self._llm.model) is None
        plan = plan if fast else self._llm.composed_plan(plan)
        length = self.num_tokens + (more or 0)
        if (
            self._cache is not None
            and self._cache.can_rewind
            and _read_alike(self._cache.run.plan, plan)
            and (more is None or self._cache.rotation == self._llm.rotation(length))
        ):
            self._cache.rewind()
            started, is_new = perf_counter(), self._cache.run.plan != plan
            self._cache.replan(plan)
            if is_new:
                self._cache.prepare()  # now, and not in the first decode step
            self._build_s = perf_counter() - started
            return self._cache
        self._cache = self._session = None  # the memory of the old one is free before the new one grows
        self._llm.fast_path.release()
        started = perf_counter()
        total = self.num_tokens + max(more or 0, 256)
        rows = row_lengths([total], plan.page_size or DEFAULT_PAGE_SIZE) if fast else ()
        cache = self._llm.new_cache(plan, total, rows, length)
        self._llm.prefill(cache, self._ids, self._progress)
        read = perf_counter()
        cache.prepare()
        self.read_s, self._build_s = read - started, perf_counter() - read
        self.read_stats = cache.stats.report()
        cache.stats.clear()
        cache.mark()
        self._cache = cache  # only now: a reading that was interrupted leaves nothing behind
        return cache

    def ask(
        self,
        question: str,
        *,
        plan: PlanSpec = None,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        on_text: Callable[[str], None] | None = None,
        question_phase: Phase = "prefill",
    ) -> Answer:
        """Answer a question about the document.

        Args:
            question: in plain words.
            plan: instead of the document's.
            max_new_tokens: at most so many tokens are generated.
            sampling: how to choose tokens; greedy by default.
            on_text: called with every new piece of text.
            question_phase: "decode" answers the question's own tokens under the decode rule too, one by one: the
                harder protocol of Quest's evaluation.

        Returns:
            The answer. Its ``ttft_s`` counts from the cached document and includes ``build_s``, in which
            the plan built its index over it, the first time; see ``read_s`` for the document itself.
        """
        if question_phase not in PHASES:
            raise unknown("question_phase", question_phase, PHASES)
        ids = self.check(question, max_new_tokens, plan)
        answer = self.go_on(
            ids, plan=plan, max_new_tokens=max_new_tokens, sampling=sampling, stop=self._stop, on_text=on_text,
            question_phase=question_phase,
        )  # fmt: skip
        answer.text = answer.text.strip()
        return answer

    def go_on(
        self,
        ids: list[int],
        *,
        plan: PlanSpec = None,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        stop: str | None = None,
        on_text: Callable[[str], None] | None = None,
        question_phase: Phase = "prefill",
    ) -> Answer:
        """As ``ask``, for a whole prompt as tokens, which begins with the document's; the text is left as it is."""
        plan = self._plan if plan is None else parse_plan(plan)
        request = self._llm.request(ids, max_new_tokens, sampling, stop, on_text is not None)
        with self._llm.fast_path.turn, self._alone():
            cache = self.prefill(plan, request.length - self.num_tokens)
            return self._answer(cache, Transcript(request, self._llm.tokenizer), question_phase, on_text)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One question at a time, as all of them use the same cache.

        Raises:
            InputError: if this thread is in the middle of another.
        """
        if self._asked_by == get_ident():
            raise InputError("this document is being asked; ask it again when the answer is there, not from on_text.")
        with self._lock:
            self._asked_by = get_ident()
            try:
                yield
            finally:
                self._asked_by = 0

    def _answer(
        self, cache: SparseCache, transcript: Transcript, phase: Phase, on_text: Callable[[str], None] | None
    ) -> Answer:
        llm, started, cached = self._llm, perf_counter() - self._build_s, cache.get_seq_length()
        loops: list[DecodeLoop] = []
        reason = llm.fast_path.reason_against(cache.run.plan, llm.model)
        for piece in (
            self._captured(cache, transcript, phase, loops)
            if reason is None
            else decode_composed(llm, cache, transcript, phase)
        ):
            if on_text is not None:
                on_text(piece)
        total = len(transcript.request.ids)
        return answer_of(
            llm, cache, transcript, started, total, new_prompt_tokens=total - cached,
            loop=next(iter(loops), None), path=reason or "", build_s=self._build_s,
        )  # fmt: skip

    def _captured(
        self, cache: SparseCache, transcript: Transcript, phase: Phase, loops: list[DecodeLoop]
    ) -> Iterator[str]:
        llm, request = self._llm, transcript.request
        yield from first_token(llm, cache, transcript, phase)
        total = len(request.ids) + request.max_new_tokens
        self._session = llm.fast_path.extend(llm.model, cache, total, self._session)
        yield from decode_captured(cache, self._session, transcript, loops)


def _read_alike(plan: Plan, other: Plan) -> bool:
    """Whether a document read under a plan can be asked under the other without reading it again."""
    learns = other.decode is not None and other.decode.method.wants_queries
    return plan.prefill == other.prefill and (not learns or plan.decode == other.decode)
