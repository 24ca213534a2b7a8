"""A document that is prefilled once and asked many times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import Lock, get_ident
from time import perf_counter
from typing import Any, Protocol, Unpack

from kvsift.batching.row import CacheReport
from kvsift.engine.decode_paths import decode_beside, row_beside
from kvsift.engine.exactness import check_exact, exact_decoder
from kvsift.engine.fast_path import in_turns
from kvsift.engine.generation import answer_of, check_captured, log_of
from kvsift.engine.model_runner import ModelRunner, require_tokens
from kvsift.engine.options import GenerateOptions, Options, ProgressCallback, Stop
from kvsift.engine.prefill_sharing import can_share_prefill
from kvsift.engine.prompt import DocumentPrompts, DocumentText, require_text
from kvsift.engine.result import Answer
from kvsift.engine.saved_document import check_saving, check_target, save
from kvsift.engine.session import Session, row_lengths
from kvsift.engine.text_offsets import TextOffsets
from kvsift.engine.transcript import Transcript
from kvsift.engine.uncopied import Uncopied
from kvsift.errors import InputError, unknown
from kvsift.layer.layer_cache import DEFAULT_PAGE_SIZE
from kvsift.methods import checks
from kvsift.methods.base import Phase
from kvsift.models.inference import inference
from kvsift.models.transformers import PlanSpec, SparseCache
from kvsift.plan.plan import PHASES, Plan

LONG = 512  # tokens of a question; one that is longer, and longer than the context, was probably meant as the context


class CacheContents(Protocol):
    """What fills the cache of a document instead of a prefill, for instance a ``SavedDocument``."""

    @property
    def rotation(self) -> int | None:
        """See ``SparseCache.rotation``."""

    @property
    def read_s(self) -> float:
        """Seconds that the prefill took."""

    @property
    def read_stats(self) -> dict[str, Any]:
        """Counters of the prefill."""

    def fill(self, cache: SparseCache, runner: ModelRunner) -> None:
        """Fill an empty cache with the tokens of the document."""


class Document(Uncopied):
    """A prefilled context. Every question starts from the same cache and leaves it unchanged.

    Threads may share it; their questions are answered one after the other.

    Args:
        runner: of the model, for instance an ``LLM``.
        ids: the tokens that all questions share.
        encode: returns the whole prompt of a question, which begins with ``ids``.
        plan: of questions without a plan of their own.
        progress: called while the document is prefilled, with the first question.
        stop: text, or several texts, that end an answer to ``ask``.
        text: from which ``ids`` and ``encode`` were made, for ``save``.

    Attributes:
        read_s: seconds spent on prefilling the document, maybe before it was saved.
        read_stats: counters of that prefill.
        open_s: seconds spent on opening the document; 0 if it was prefilled here.
        text: as given.
    """

    INSTEAD = "Write it to a file with save, and open that with llm.open."

    def __init__(
        self,
        runner: ModelRunner,
        ids: list[int],
        encode: Callable[[str], list[int]],
        plan: Plan,
        progress: ProgressCallback | None = None,
        stop: Stop = None,
        text: DocumentText | None = None,
    ) -> None:
        checks.function("progress", progress)
        self._runner, self._ids, self._encode, self._plan, self._progress = runner, ids, encode, plan, progress
        self._stop, self.text = stop, text
        self._cache: SparseCache | None = None
        self._session: Session | None = None  # captured steps over the cache
        self._lock, self._thread = Lock(), 0  # the thread whose question is being answered
        self.read_s = self.open_s = self._build_s = 0.0  # _build_s: what the last call of ``prefill`` built for decode
        self.read_stats: dict[str, Any] = {}

    def __repr__(self) -> str:
        read = "not prefilled yet"
        if self._cache is not None:
            read = f"opened in {self.open_s:.1f} s" if self.open_s else f"prefilled in {self.read_s:.1f} s"
        return f"<Document of {self.num_tokens:,} tokens for {self._runner.directory.name}, {self._plan}, {read}>"

    @property
    def num_tokens(self) -> int:
        """Tokens that all questions share."""
        return len(self._ids)

    def check(self, question: str, max_new_tokens: int, plan: PlanSpec = None) -> list[int]:
        """Refuse a question that cannot be asked, before the weights are loaded.

        Returns:
            Its whole prompt.

        Raises:
            InputError: if it is empty, longer than ``LONG`` and the document, or makes the prompt too long.
        """
        require_text(question, "question")
        if not question.strip():
            raise InputError("the question is empty.")
        self._runner.check_text(question)
        length = len(self._runner.tokenizer(question, add_special_tokens=False, verbose=False)["input_ids"])
        if length > max(self.num_tokens, LONG):
            raise InputError(
                f"the question has {length:,} tokens and the context only {self.num_tokens:,}. Were they swapped? The "
                "long text is the context."
            )
        ids = self._encode(question)
        if ids[: self.num_tokens] != self._ids:
            raise InputError(
                f"the tokenizer joins the question {question.strip()[:40]!r} with the end of the document. Begin it "
                "with a word."
            )
        self._runner.check_prompts([ids], max_new_tokens, self._resolved(plan))
        return ids

    def _resolved(self, plan: PlanSpec, exact: bool = False) -> Plan:
        return self._runner.plan_of(plan, self._plan, exact)

    def prefill(self, plan: Plan, more: int | None = None) -> SparseCache:
        """The cache of the document under a plan, with room for ``more`` tokens after it. None: no token will follow,
        so any rotation is right.

        The document is prefilled again only if the plan prefills differently, if the last answer has evicted a part of
        it (evict=true), or if RoPE rotates a sequence of this length differently.
        """
        runner = self._runner
        plan = self._executed(plan)
        length = self.num_tokens + (more or 0)
        if (
            self._cache is not None
            and self._cache.can_rewind
            and can_share_prefill(self._cache.run.plan, plan)
            and (more is None or self._cache.rotation == runner.rotation(length))
        ):
            self._cache.rewind()
            started, is_new = perf_counter(), self._cache.run.plan != plan
            self._cache.replan(plan)
            if is_new:
                self._cache.prepare()  # now, and not in the first decode step
            self._build_s = perf_counter() - started
            return self._cache
        cache, started = self._new_cache(plan, more), perf_counter()
        runner.prefill(cache, self._ids, self._progress)
        prefilled = perf_counter()
        cache.prepare()
        self.read_s, self._build_s, self.open_s = prefilled - started, perf_counter() - prefilled, 0.0
        self.read_stats = cache.stats.report()
        cache.stats.clear()
        cache.mark()
        self._cache = cache  # only now: an interrupted prefill leaves no cache
        return cache

    def _executed(self, plan: Plan) -> Plan:
        """The plan as it runs on this machine."""
        return plan if self._runner.composed_reason(plan) is None else self._runner.composed_plan(plan)

    def _new_cache(self, plan: Plan, more: int | None) -> SparseCache:
        """An empty cache for the document and ``more`` tokens; the old one is dropped."""
        runner = self._runner
        self._cache = self._session = None  # the memory of the old cache is free before the new one grows
        runner.release()
        total = self.num_tokens + max(more or 0, 256)
        captured = runner.composed_reason(plan) is None
        rows = row_lengths([total], plan.page_size or DEFAULT_PAGE_SIZE) if captured else ()
        return runner.new_cache(plan, total, rows, self.num_tokens + (more or 0))

    def save(self, path: str | Path) -> None:
        """Write the document to a file, from which ``LLM.open`` continues without a prefill. It is prefilled now if no
        question was asked yet, or the last one's plan prefills differently from the document's.

        Raises:
            InputError: if the file cannot be written, or tokens were dropped (evict=true); an older file stays then.
        """
        path, runner = checks.path_of("path", path).resolve(), self._runner
        check_target(path)
        if self.text is None:
            raise InputError("this document was made of tokens, without its text. Documents of llm.read can be saved.")
        check_saving(runner, self._plan, self.num_tokens, path)
        if self._cache is None:
            runner.check_prompts([self._ids], 1, self._plan)
        with runner.fast_path.turn, self._exclusive(), inference():
            if self._cache is not None and not self._cache.can_rewind:
                raise InputError(
                    f"the last answer, under {self._cache.run.plan}, has dropped tokens of the document for good "
                    "(evict=true). Save it before the first question, or after one under a plan without evict=true."
                )
            save(path, runner, self.prefill(self._plan), self.text, self._ids, self.read_s, self.read_stats)

    def restore(self, saved: CacheContents) -> None:
        """Fill the cache instead of a prefill."""
        runner = self._runner
        runner.check_prompts([self._ids], 1, self._plan)
        runner.load()
        with runner.fast_path.turn, inference():
            plan, started = self._executed(self._plan), perf_counter()
            cache = self._new_cache(plan, None)
            cache.pin(saved.rotation)
            saved.fill(cache, runner)
            cache.prepare()
            cache.mark()
        self.read_s, self.read_stats, self.open_s = saved.read_s, saved.read_stats, perf_counter() - started
        self._cache = cache

    def ask(
        self,
        question: str,
        *,
        on_text: Callable[[str], None] | None = None,
        question_phase: Phase = "prefill",
        **options: Unpack[Options],
    ) -> Answer:
        """Answer a question about the document.

        Args:
            question: in plain words.
            on_text: called with every new piece of text.
            question_phase: "decode" answers the question's own tokens under the decode rule too, one by one: the
                harder protocol of Quest's evaluation.
            plan: instead of the document's.
            max_new_tokens: maximum number of tokens to generate, 64 by default.
            sampling: how to choose tokens; greedy by default.
            stop: text, or several texts, that end the answer, instead of the document's.
            stop_token_ids, skip_special_tokens: see ``LLM.generate``.
            timeout_s: end the answer after so many seconds, as it is then, with its first token at the earliest. They
                count from the cached document, as ``ttft_s`` does: what is read for the first question is read whole.
            exact: the answer of dense attention, token by token; see ``LLM.generate``.
            passages: keep which characters of the document were selected (composed steps).

        Returns:
            The answer. Its ``ttft_s`` counts from the cached document and includes ``build_s``, in which
            the plan built its index over it, the first time; see ``read_s`` for the document itself.
        """
        if question_phase not in PHASES:
            raise unknown("question_phase", question_phase, PHASES)
        chosen: Options = {"stop": self._stop, **options}
        ids = self.check(question, GenerateOptions.of(chosen).max_new_tokens, chosen.get("plan"))
        offsets = None
        if chosen.get("passages") and isinstance(self._encode, DocumentPrompts):
            offsets = self._encode.offsets(question)
        answer = self._go_on(ids, offsets, on_text, question_phase, chosen)
        answer.text = answer.text.strip()
        return answer

    def go_on(
        self,
        ids: list[int],
        *,
        on_text: Callable[[str], None] | None = None,
        question_phase: Phase = "prefill",
        **options: Unpack[Options],
    ) -> Answer:
        """As ``ask``, for a whole prompt as tokens, which begins with the document's; the text is not stripped."""
        require_tokens(ids)
        if len(ids) <= self.num_tokens or list(ids[: self.num_tokens]) != self._ids:
            raise InputError(
                f"the prompt of {len(ids):,} tokens does not begin with the {self.num_tokens:,} of the document, or "
                "ends with them. Give those of the document and of a question."
            )
        self._runner.check_prompts(
            [ids], GenerateOptions.of(options).max_new_tokens, self._resolved(options.get("plan"))
        )
        return self._go_on(ids, None, on_text, question_phase, options)

    def itl_s(self, plan: Plan, num_tokens: int) -> list[float]:
        """Seconds between so many tokens that follow the document under a plan, whatever they are."""
        options: Options = {"plan": plan, "max_new_tokens": num_tokens}
        return self._go_on([*self._ids, self._ids[-1]], None, None, "decode", options, ignores_ends=True).itl_s

    def _go_on(
        self, ids: list[int], offsets: TextOffsets | None, on_text: Callable[[str], None] | None,
        question_phase: Phase, options: Options, ignores_ends: bool = False,
    ) -> Answer:  # fmt: skip
        checks.function("on_text", on_text)
        [chosen] = GenerateOptions.of(options).split(1)
        runner = self._runner
        plan = self._resolved(chosen.plan, chosen.exact)
        check_exact(runner, plan, chosen.exact)
        if chosen.passages and offsets is None:
            raise InputError("a prompt of tokens has no text that passages could be parts of. Leave out passages.")
        with runner.fast_path.turn, self._exclusive():
            more = len(ids) - self.num_tokens + chosen.max_new_tokens - 1
            with inference():
                cache, started = self.prefill(plan, more), perf_counter() - self._build_s
            request = runner.request(ids, chosen, on_text is not None, offsets, started, ignores_ends)
            return self._answer(cache, Transcript(request, runner.tokenizer), started, question_phase, on_text)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One question at a time, since all questions use the same cache.

        Raises:
            InputError: if this thread is answering another one.
        """
        if self._thread == get_ident():
            raise InputError("this document is answering a question; ask the next one after it, not from on_text.")
        with self._lock:
            self._thread = get_ident()
            try:
                yield
            finally:
                self._thread = 0

    def _answer(
        self, cache: SparseCache, transcript: Transcript, started: float, phase: Phase,
        on_text: Callable[[str], None] | None,
    ) -> Answer:  # fmt: skip
        runner, num_cached = self._runner, cache.get_seq_length()
        plan, request = cache.run.plan, transcript.request
        reason, exact = runner.composed_reason(plan), exact_decoder(runner, request, plan)
        if reason is None:
            check_captured([request])
        in_blocks = reason is None and runner.fast_path.takes_blocks(plan, exact is not None, runner.model)
        row, is_captured = row_beside(runner, cache, transcript, exact), in_blocks or (reason is None and exact is None)
        session = partial(self._steps, cache, request.length + 1) if is_captured else None
        pieces = in_turns(nullcontext(), decode_beside(runner, [row], phase, session, in_blocks))
        cache.stats.observer = log_of(request)
        try:
            for _, piece in pieces:
                if on_text is not None:
                    on_text(piece)
            if row.error is not None:
                raise row.error
            return answer_of(
                runner, CacheReport.of(cache), transcript, started, num_cached=num_cached,
                captured=row if is_captured else None, path=reason or "", build_s=self._build_s, exact=exact,
            )  # fmt: skip
        finally:
            pieces.close()  # now, and not in the middle of the next answer
            cache.stats.observer = None

    @contextmanager
    def _steps(self, cache: SparseCache, length: int) -> Iterator[Session]:
        """Captured steps over the cache, which will grow to a length; they are kept for the next question."""
        self._session = self._runner.fast_path.extend(self._runner.model, cache, length, self._session)
        yield self._session
