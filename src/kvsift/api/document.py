"""A document that is prefilled once and asked many times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock
from time import perf_counter
from types import MappingProxyType
from typing import Any, Unpack

from kvsift.api.answer import Answer
from kvsift.api.generation import answer_of_sequence, check_captured, sequence_of
from kvsift.api.saved_document import check_same, check_saving, check_target, save
from kvsift.engine.engine import Engine
from kvsift.engine.follow import follow
from kvsift.engine.model_runner import require_tokens
from kvsift.engine.options import GenerateOptions, Options, ProgressCallback, Stop
from kvsift.engine.pinned_prefix import PinnedPrefix, PrefixSpoiled
from kvsift.engine.prefill_sharing import can_share_prefill
from kvsift.engine.request import Request
from kvsift.engine.speculative.exactness import check_exact
from kvsift.engine.transcript import TextOutput
from kvsift.engine.uncopied import Uncopied
from kvsift.errors import (
    Conflict,
    EmptyText,
    EvictedTokens,
    InvalidValue,
    UnsupportedCall,
    UnsupportedPrompt,
    unknown,
)
from kvsift.methods import checks
from kvsift.methods.base import Phase
from kvsift.models.hf.sparse import PlanSpec, SparseCache
from kvsift.models.inference import inference
from kvsift.plan.plan import PHASES, Plan
from kvsift.tokenization.prompt import DocumentPrompts, DocumentText, require_text
from kvsift.tokenization.text_offsets import TextOffsets

LONG = 512  # tokens of a question; one that is longer, and longer than the context, was probably meant as the context


class Document(Uncopied):
    """A prefilled context. Every question starts from the same cache and leaves it unchanged.

    Threads may share it, and their questions are answered side by side; under plans that drop tokens, and with keys in
    host memory, one after the other.

    Args:
        runner: the ``LLM``.
        ids: the tokens that all questions share.
        encode: returns the whole prompt of a question, which begins with ``ids``.
        plan: plan of questions without a plan of their own.
        progress: called while the document is prefilled, with the first question.
        stop: text, or several texts, that end an answer to ``ask``.
        text: the text of which ``ids`` and ``encode`` were made, for ``save``.

    Attributes:
        read_s: seconds spent on prefilling the document, maybe before it was saved.
        read_stats: counters of that prefill.
        open_s: seconds spent on opening the document; 0 if it was prefilled here.
        text: the text as given.
    """

    INSTEAD = "Write it to a file with save, and open that with llm.open."

    def __init__(
        self,
        runner: Engine,
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
        self._prefix: PinnedPrefix | None = None
        self._lock = Lock()  # while the document is prefilled
        self.read_s = self.open_s = self._build_s = 0.0  # _build_s: what the last call of ``prefill`` built for decode
        self.read_stats: dict[str, Any] = {}

    def __repr__(self) -> str:
        read = "not prefilled yet"
        if self._prefix is not None:
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
            raise EmptyText("the question is empty.")
        self._runner.check_text(question)
        length = len(self._runner.tokenizer(question, add_special_tokens=False, verbose=False)["input_ids"])
        if length > max(self.num_tokens, LONG):
            raise InvalidValue(
                f"the question has {length:,} tokens and the context only {self.num_tokens:,}. Were they swapped? The "
                "long text is the context."
            )
        ids = self._encode(question)
        if ids[: self.num_tokens] != self._ids:
            raise UnsupportedPrompt(
                f"the tokenizer joins the question {question.strip()[:40]!r} with the end of the document. Begin it "
                "with a word."
            )
        self._runner.check_prompts([ids], max_new_tokens, self._resolved(plan))
        return ids

    def _resolved(self, plan: PlanSpec, exact: bool = False) -> Plan:
        return self._runner.plan_of(plan, self._plan, exact)

    def prefill(self, plan: Plan, more: int | None = None) -> SparseCache:
        """The cache of the document under a plan, with room for ``more`` tokens after it, for a caller that has the
        document to itself until the next question. None: no token will follow, so any rotation is right.

        The document is prefilled again only if the plan prefills differently, if the last answer has evicted a part of
        it (evict=true), or if RoPE rotates a sequence of this length differently.
        """
        plan = self._runner.executed_plan(plan, self.num_tokens + (more or 0))
        prefix = self._prefilled(plan, more)
        return self._runner.loop.call(partial(self._runner.loop.rewound, prefix, plan))

    def _prefilled(self, plan: Plan, more: int | None) -> PinnedPrefix:
        """The document's tokens, cached as a plan prefills them."""
        with self._lock:
            prefix = self._prefix
            if prefix is None or not self._runner.loop.call(partial(self._fits, prefix, plan, more)):
                prefix = self._read(plan, more)
            return prefix

    def _fits(self, prefix: PinnedPrefix, plan: Plan, more: int | None) -> bool:
        """Whether a question under a plan can begin with a prefix, with room for ``more`` tokens."""
        cache, runner = prefix.cache, self._runner
        if cache is None or prefix.is_spoiled or not can_share_prefill(cache.run.plan, plan):
            return False
        return more is None or cache.rotation == runner.rotation(self.num_tokens + more)

    def _read(self, plan: Plan, more: int | None) -> PinnedPrefix:
        """Prefill the document; its old cache is dropped."""
        runner, prefix = self._runner, PinnedPrefix(self.num_tokens)
        self._prefix = None  # the memory of the old cache is free before the new one grows
        runner.load()
        runner.loop.release()
        output = TextOutput(Request(self._ids, max(more or 0, 1), plan), runner.tokenizer, runner.device)
        seq = sequence_of(runner, output, pins=prefix)
        started, total = perf_counter(), self.num_tokens
        for _ in follow(runner.loop, [seq], [output]):
            if self._progress is not None:
                self._progress(min(output.num_prefilled, total), total)
        if seq.error is not None:
            raise seq.error
        assert seq.report is not None
        self.read_s, self.open_s = perf_counter() - started - prefix.build_s, 0.0
        self.read_stats = seq.report.stats.report()
        self._prefix = prefix  # only now: an interrupted prefill leaves no cache
        return prefix

    def save(self, path: str | Path) -> None:
        """Write the document to a file, from which ``LLM.open`` continues without a prefill. It is prefilled now if no
        question was asked yet, or the last one's plan prefills differently from the document's. Of files that exist,
        only a saved document of the same text and model is replaced.

        Raises:
            InputError: if the file cannot be written, is another one, or tokens were dropped (evict=true); an older
                file stays then.
        """
        path, runner = checks.path_of("path", path).resolve(), self._runner
        check_target(path)
        if self.text is None:
            raise UnsupportedCall(
                "this document was made of tokens, without its text. Documents of llm.read can be saved."
            )
        check_same(path, runner, self.text)
        check_saving(runner, self._plan, self.num_tokens, path)
        if self._prefix is None:
            runner.check_prompts([self._ids], 1, self._plan)
        elif self._prefix.is_spoiled:
            raise EvictedTokens(
                "the last answer has dropped tokens of the document for good (evict=true). Save it before the first "
                "question, or after one under a plan without evict=true."
            )
        plan = runner.executed_plan(self._plan, self.num_tokens, is_observed=True)
        prefix = self._prefilled(plan, None)
        try:
            with runner.loop.leased(prefix, plan) as cache, runner.fast_path.turn, inference():
                save(path, runner, cache, self.text, self._ids, self.read_s, self.read_stats)
        except PrefixSpoiled:  # by an answer to another thread, or by a fault of the engine
            raise EvictedTokens(
                "the document was changed by an answer that ended meanwhile (evict=true), or the engine has failed. "
                "Ask it a question under a plan without evict=true, and save it again."
            ) from None

    def restore(
        self, fill: Callable[[SparseCache], None], rotation: int | None = None, read_s: float = 0.0,
        read_stats: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Fill the cache instead of a prefill.

        Args:
            fill: fills an empty cache with the tokens of the document.
            rotation: see ``SparseCache.rotation``.
            read_s, read_stats: seconds and counters of the prefill that ``fill`` stands for.
        """
        runner = self._runner
        runner.check_prompts([self._ids], 1, self._plan)
        runner.load()
        started, prefix = perf_counter(), PinnedPrefix(self.num_tokens)
        plan = runner.executed_plan(self._plan, self.num_tokens, is_observed=True)
        seq = sequence_of(runner, TextOutput(Request(self._ids, 1, plan), runner.tokenizer, runner.device), pins=prefix)
        runner.loop.restore_prefix(seq, rotation, fill)
        self.read_s, self.read_stats, self.open_s = read_s, dict(read_stats), perf_counter() - started
        self._prefix = prefix

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
            question: a question in plain words.
            on_text: called with every new piece of text.
            question_phase: "decode" answers the question's own tokens under the decode rule too, one by one: the
                harder protocol of Quest's evaluation.
            plan: instead of the document's.
            max_new_tokens: maximum number of tokens to generate, 64 by default.
            sampling: how to choose tokens; greedy by default.
            stop: text, or several texts, that end the answer, instead of the document's.
            stop_token_ids, skip_special_tokens: see ``LLM.generate``.
            timeout_s: end the answer after so many seconds, as it is then, with its first token at the earliest. They
                count from the cached document, as ``ttft_s`` does: what is prefilled for the first question is
                prefilled whole.
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
            raise InvalidValue(
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
            raise Conflict("a prompt of tokens has no text that passages could be parts of. Leave out passages.")
        while True:
            with suppress(PrefixSpoiled):  # by the answer before, for which this question has waited
                return self._answer(ids, plan, chosen, offsets, on_text, question_phase, ignores_ends)

    def _answer(
        self, ids: list[int], plan: Plan, options: GenerateOptions, offsets: TextOffsets | None,
        on_text: Callable[[str], None] | None, question_phase: Phase, ignores_ends: bool,
    ) -> Answer:  # fmt: skip
        runner, before = self._runner, self._prefix
        reason, length = runner.reason_uncaptured(plan), len(ids) + options.max_new_tokens
        asked, plan = plan, runner.executed_plan(plan, length, options)
        prefix = self._prefilled(plan, length - self.num_tokens - 1)
        build_s, started, streamed = 0.0 if prefix is before else prefix.build_s, perf_counter(), on_text is not None
        request = runner.request(ids, plan, options, streamed, offsets, started - build_s, ignores_ends, asked=asked)
        if reason is None and runner.fast_path.is_required:
            check_captured([request])
        output = TextOutput(request, runner.tokenizer, runner.device)
        decode_from = self.num_tokens if question_phase == "decode" else None
        seq = sequence_of(runner, output, prefix=prefix, decode_from=decode_from)
        for _, piece in follow(runner.loop, [seq], [output]):
            if piece and on_text is not None:
                on_text(piece)
        if seq.error is not None:
            raise seq.error
        seq.build_s += build_s
        return runner.loop.call(partial(answer_of_sequence, runner, seq, output.transcript, started - build_s))
