"""Documents in the engine process: prefilled once, and held in the loop for the questions about them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from time import sleep
from typing import Any, Generic, TypeVar

from torch import Tensor

from kvsift.api.llm import LLM
from kvsift.engine.request import Request
from kvsift.engine.sequence import EngineSequence, FinishReason
from kvsift.errors import InputError, Unavailable, UnreadableFile, UnsupportedPrompt
from kvsift.plan.plan import Plan
from kvsift.server.kept_prompts import drop, keep, remove, source_of
from kvsift.tokenization.growing_text import GrowingText
from kvsift.tokenization.prompt import DocumentPrompts, PromptFormat

RETRY_S = 1.0  # between two tries to enter a full queue
DELETED = "the document was deleted."
Question = TypeVar("Question")


class DocumentPrefill:
    """A ``SequenceOutput`` that ends with prefill.

    Args:
        on_end: called then, while the sequence has its cache.

    Attributes:
        num_prefilled: tokens that are cached.
    """

    constraint = None

    def __init__(self, on_end: Callable[[], None]) -> None:
        self.num_prefilled, self._on_end = 0, on_end

    def note_prefilled(self, num_tokens: int) -> None:
        """Keep the progress of prefill."""
        self.num_prefilled = num_tokens

    def foresee(self, logits: Tensor, ahead: int) -> int:
        """Return the token that is never fed."""
        return 0

    def take(self, logits: Tensor | int, probe_s: float) -> tuple[int, FinishReason]:
        """End; the token is never fed."""
        self._on_end()
        return 0, "stop"


@dataclass(eq=False)
class HeldDocument(Generic[Question]):
    """A document and the questions that wait for it.

    Attributes:
        seq: the sequence that prefills it and holds its chunks; None before.
        kept: file of its prefill; None: none is kept.
        num_prefilled, num_reported: tokens that are cached, and those that the server was notified of.
        error: why it cannot be asked about; empty if it can.
        growing: common text of the prompts about it.
    """

    key: str
    text: str
    client: str
    salt: str
    kept: Path | None = None
    seq: EngineSequence | None = None
    output: DocumentPrefill | None = None
    tokens: int = 0
    num_reported: int = 0
    is_settled: bool = False
    error: str = ""
    waiting: list[Question] = field(default_factory=list)
    growing: GrowingText = field(default_factory=GrowingText)

    @property
    def num_prefilled(self) -> int:
        return 0 if self.output is None else self.output.num_prefilled


class HeldDocuments(Generic[Question]):
    """Documents over the loop of an LLM, which shares prefill between their clients.

    Args:
        llm: an ``LLM`` whose weights are loaded.
        plan: plan of their prefill.
        send: a message to the server.
        begin: starts a question whose document is ready; it may have been cancelled.
        refuse: ends a question whose document has failed, with the reason.
    """

    def __init__(
        self, llm: LLM, form: PromptFormat, plan: Plan, send: Callable[[dict[str, Any]], None],
        begin: Callable[[Question], None], refuse: Callable[[Question, str], None],
    ) -> None:  # fmt: skip
        self._llm, self._form, self._plan, self._send = llm, form, plan, send
        self._begin, self._refuse = begin, refuse
        self._held: dict[str, HeldDocument[Question]] = {}
        self._in_prefill: dict[HeldDocument[Question], EngineSequence] = {}  # those whose sequences have not ended
        self._queue: SimpleQueue[HeldDocument[Question]] = SimpleQueue()
        self._lock = Lock()
        Thread(target=self._prefill_all, daemon=True).start()

    def add(self, message: dict[str, Any]) -> None:
        """Queue a document for tokenization and prefill."""
        document: HeldDocument[Question] = HeldDocument(
            message["document"], message["text"], message["client"], message["salt"],
            None if message["kept"] is None else Path(message["kept"]),
        )  # fmt: skip
        self._release(document.key)
        self._held[document.key] = document
        self._queue.put(document)

    def forget(self, key: str) -> None:
        """Release a deleted document, refuse the questions that wait for it, and delete its file."""
        document = self._release(key)
        if document is not None and document.kept is not None:
            remove(document.kept)

    def _release(self, key: str) -> HeldDocument[Question] | None:
        document = self._held.pop(key, None)
        if document is not None:
            self._settle(document, DELETED)
            if document.seq is not None:
                self._llm.loop.close(document.seq)
        return document

    def text(self, key: str) -> tuple[str, GrowingText]:
        """Return the text of a document, and what encodes prompts about it.

        Raises:
            InputError: if it was deleted, or cannot be read.
        """
        document = self._held.get(key)
        if document is None:
            raise Unavailable(DELETED)
        if document.error:
            raise UnreadableFile(f"the document cannot be read: {document.error}")
        return document.text, document.growing

    def ask(self, key: str, question: Question) -> None:
        """Start a question as soon as its document is ready."""
        document = self._held.get(key)
        if document is None:
            self._refuse(question, DELETED)
            return
        with self._lock:
            waits = not document.is_settled
            if waits:
                document.waiting.append(question)
        if not waits:
            self._answer(document, question)

    def report(self) -> None:
        """Notify the server of the progress that a step has made."""
        for document, seq in [*self._in_prefill.items()]:
            try:
                self._report(document, seq)
            except Exception as error:
                self._fail(document, error)

    def _fail(self, document: HeldDocument[Question], error: Exception) -> None:
        """End a document that fails before or during prefill; others continue."""
        if not isinstance(error, InputError):
            traceback.print_exception(error)
        if document.seq is not None:
            self._llm.loop.close(document.seq)
        self._in_prefill.pop(document, None)
        document.is_settled = False
        self._settle(document, _reason(error))

    def _report(self, document: HeldDocument[Question], seq: EngineSequence) -> None:
        ended = seq.is_ended  # before its progress is fetched
        if ended:
            error = seq.error
            if error is not None and not isinstance(error, InputError):
                traceback.print_exception(error)
            self._in_prefill.pop(document, None)
            if error is not None and seq.source is not None and document.kept is not None:
                drop(document.kept, _reason(error))  # and it is prefilled from its text
                if document.kept.exists():  # it would be tried again
                    document.kept = None
                self._queue.put(document)
            else:
                self._settle(document, "" if error is None else _reason(error))
        elif seq.no_reuse:  # every question prefills it again
            self._in_prefill.pop(document, None)
            self._llm.loop.close(seq)
            self._settle(document, "")
        elif document.num_prefilled != document.num_reported:
            document.num_reported = document.num_prefilled
            self._notify(document, "reading")

    def _prefill_all(self) -> None:
        while True:
            document = self._queue.get()
            if document.is_settled:  # it was deleted meanwhile
                continue
            try:
                self._prefill(document)
            except Exception as error:
                self._fail(document, error)

    def _prefill(self, document: HeldDocument[Question]) -> None:
        self._notify(document, "reading")
        seq = self._seq(document)
        document.seq, document.tokens = seq, len(seq.request.ids)
        self._in_prefill[document] = seq
        self._notify(document, "reading")
        while not self._submits(seq):
            sleep(RETRY_S)
        if self._held.get(document.key) is not document:  # deleted meanwhile
            self._llm.loop.close(seq)

    def _submits(self, seq: EngineSequence) -> bool:
        """Queue a sequence, unless too many wait."""
        try:
            self._llm.loop.submit(seq)
        except InputError:
            return False
        return True

    def _seq(self, document: HeldDocument[Question]) -> EngineSequence:
        self._llm.check_text(document.text)
        ids = DocumentPrompts(self._form, document.text, growing=document.growing).ids
        if not ids:
            raise UnsupportedPrompt("the chat template has no place for a document.")
        document.tokens = len(ids)
        self._llm.check_prompts([ids], 1, self._plan)
        seq = self._new_sequence(document, ids)
        if document.kept is not None:
            seq.source = source_of(document.kept, self._llm, seq)
        return seq

    def _new_sequence(self, document: HeldDocument[Question], ids: Sequence[int]) -> EngineSequence:
        def on_end() -> None:
            if document.kept is not None and seq.source is None and self._held.get(document.key) is document:
                keep(document.kept, self._llm, seq, document.text)
                if self._held.get(document.key) is None:  # deleted meanwhile
                    remove(document.kept)

        document.output = DocumentPrefill(on_end)
        plan = self._llm.executed_plan(self._plan, len(ids), is_observed=True)
        request = Request(ids, 1, plan, client=document.client, salt=document.salt)
        seq = EngineSequence(request, document.output, holds=True)
        return seq

    def _settle(self, document: HeldDocument[Question], error: str) -> None:
        """End the prefill of a document, which is ready or has failed, and start or refuse its questions."""
        with self._lock:
            if document.is_settled:
                return
            document.is_settled, document.error = True, error
        self._notify(document, "failed" if error else "ready")
        with self._lock:
            waiting, document.waiting = document.waiting, []
        for question in waiting:
            self._answer(document, question)

    def _answer(self, document: HeldDocument[Question], question: Question) -> None:
        if document.error:
            self._refuse(question, document.error)
        else:
            self._begin(question)

    def _notify(self, document: HeldDocument[Question], status: str) -> None:
        seq = document.seq
        message: dict[str, Any] = {"op": "document", "document": document.key, "status": status}
        if status == "failed":
            message |= {"error": document.error, "pinned": False}
        else:
            done = document.tokens if status == "ready" else document.num_prefilled
            message |= {"num_prefilled": done, "error": None, "pinned": seq is None or not seq.no_reuse}
        self._send({**message, "tokens": document.tokens or None})


def _reason(error: BaseException) -> str:
    if isinstance(error, InputError):
        return str(error)
    return f"reading it failed ({type(error).__name__}); the log has the reason."
