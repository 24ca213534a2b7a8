"""Documents in the engine process: questions wait for theirs, and end with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine.tiny_directory import text_of
from server.serving import until

from kvsift import LLM
from kvsift.engine.executor import Executor
from kvsift.engine.sequence import EngineSequence
from kvsift.errors import InputError
from kvsift.server import held_documents
from kvsift.server.held_documents import HeldDocuments
from kvsift.tokenization.prompt import PromptFormat


class Held:
    """Held documents, and what they say."""

    def __init__(self, model: Path, plan: str = "quest:budget=96:window=32") -> None:
        self.llm = LLM(model, plan, device="cpu", path="composed", chunk_size=64)
        self.llm.load()
        self.messages: list[dict[str, Any]] = []
        self.begun: list[str] = []
        self.refused: list[tuple[str, str]] = []
        self.documents = HeldDocuments[str](
            self.llm, PromptFormat(self.llm.tokenizer), self.llm.plan,
            self.messages.append, self.begun.append,
            lambda question, reason: self.refused.append((question, reason)),
        )  # fmt: skip
        self.llm.loop.after_step = self.documents.report
        self.llm.loop.start()

    def add(self, key: str, text: str, kept: Path | None = None) -> None:
        path = None if kept is None else str(kept)
        message = {"op": "prefill", "document": key, "text": text, "client": "me", "salt": "", "kept": path}
        self.documents.add(message)

    def forget(self, key: str) -> None:
        self.documents.forget(key)
        self.llm.loop.step()

    def step(self, done: Callable[[], object]) -> None:
        def stepped() -> object:
            self.llm.loop.step()
            self.llm.loop.check()
            return done()

        until(stepped)

    def of(self, key: str) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["document"] == key]


def test_questions_begin_when_their_document_is_read_and_the_second_waits_in_line(model: Path) -> None:
    held = Held(model)
    held.add("a", text_of(900))
    held.add("b", "B " + text_of(500))
    held.documents.ask("b", "about b")
    held.documents.ask("a", "about a")
    held.step(lambda: len(held.begun) == 2)
    assert held.begun == ["about a", "about b"]
    held.documents.ask("a", "at once")
    assert held.begun[-1] == "at once"
    notified = held.of("a")
    assert [message["status"] for message in notified[-1:]] == ["ready"]
    read = [message["num_prefilled"] for message in notified]
    assert read == sorted(read)
    assert read[-1] == notified[-1]["tokens"] > 900
    assert len(set(read)) > 5, "chunk by chunk"
    used = held.llm.loop.pages.kv.pages.num_used
    assert used >= 1300 // 16, "both are held"
    held.forget("a")
    assert 0 < held.llm.loop.pages.kv.pages.num_used < used
    held.forget("b")
    assert held.llm.loop.pages.kv.pages.num_used == 0
    assert not held.refused


def test_a_text_of_megabytes_is_refused_before_it_is_tokenised(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(model)

    def tokenise(*_: Any, **__: Any) -> None:
        raise AssertionError("it takes a minute and gigabytes")

    monkeypatch.setattr("kvsift.server.held_documents.DocumentPrompts", tokenise)
    held.add("a", "mill " * 3_000_000)
    until(lambda: [message for message in held.of("a") if message["status"] == "failed"])
    assert held.of("a")[-1]["error"].startswith(
        "This model's maximum context length is 4096 tokens. The text has 15,000,000 char"
    )


def test_a_deleted_document_refuses_those_that_wait_and_the_next_one_is_read(model: Path) -> None:
    held = Held(model)
    held.add("a", text_of(900))
    held.documents.ask("a", "about a")
    held.step(lambda: any(message.get("num_prefilled") for message in held.of("a")))
    held.documents.forget("a")
    assert held.refused == [("about a", "the document was deleted.")]
    held.documents.ask("a", "later")
    assert held.refused[-1] == ("later", "the document was deleted.")
    held.add("b", text_of(300))
    held.step(lambda: held.of("b") and held.of("b")[-1]["status"] == "ready")
    held.forget("b")
    assert held.llm.loop.pages.kv.pages.num_used == 0
    assert not held.begun


@pytest.mark.parametrize("when", ["before it is written", "after"])
def test_a_document_that_is_deleted_while_it_is_kept_leaves_no_file(
    when: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, kept = Held(model), tmp_path / "a.kvsift"

    def keep(path: Path, *_: object) -> None:
        if when == "after":
            path.write_bytes(b"keys and values")
        held.documents.forget("a")
        if when != "after":
            path.write_bytes(b"keys and values")

    monkeypatch.setattr("kvsift.server.held_documents.keep", keep)
    held.add("a", text_of(300), kept)
    held.step(lambda: "a" not in held.documents._held)
    assert not kept.exists()


def test_a_document_that_fails_says_why_and_the_next_one_is_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, read = Held(model), Executor.prefill

    def failing(self: Executor, seq: EngineSequence, ids: Any, pause: Any = None) -> Any:
        if len(held.of("b")) == 0:
            raise RuntimeError("a fault")
        return read(self, seq, ids, pause)

    monkeypatch.setattr(Executor, "prefill", failing)
    held.add("a", text_of(300))
    held.documents.ask("a", "about a")
    held.step(lambda: held.refused)
    assert held.refused == [("about a", "reading it failed (RuntimeError); the log has the reason.")]
    held.documents.ask("a", "again")
    assert len(held.refused) == 2
    held.add("b", text_of(300))
    held.step(lambda: held.of("b") and held.of("b")[-1]["status"] == "ready")


def test_a_plan_whose_prompts_share_nothing_reads_nothing_ahead(model: Path) -> None:
    held = Held(model, "snapkv:budget=96:window=32")
    held.add("a", text_of(300))
    held.documents.ask("a", "about a")
    held.step(lambda: held.begun)
    assert held.of("a")[-1]["pinned"] is False
    assert held.of("a")[-1]["status"] == "ready"
    held.llm.loop.step()
    assert held.llm.loop.pages.kv.pages.num_used == 0


def test_a_full_queue_is_tried_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, tries = Held(model), list[EngineSequence]()
    submit = held.llm.loop.submit

    def full(seq: EngineSequence) -> None:
        tries.append(seq)
        if len(tries) < 3:
            raise InputError("too many requests are waiting.")
        submit(seq)

    monkeypatch.setattr(held.llm.loop, "submit", full)
    monkeypatch.setattr(held_documents, "RETRY_S", 0.01)
    held.add("a", text_of(300))
    held.step(lambda: held.of("a") and held.of("a")[-1]["status"] == "ready")
    assert len(tries) == 3


@pytest.mark.parametrize("place", ["tokens", "the queue", "progress", "the end", "keeping", "a file that stays"])
def test_a_document_that_fails_anywhere_ends_alone(
    place: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, kept, tell = Held(model), tmp_path / "a.kvsift", HeldDocuments._notify

    def failing(*_: Any, **options: Any) -> None:
        raise OSError("a fault")

    def silent(documents: Any, document: Any, status: str) -> None:
        notified = held.of("a")
        if document.key == "a" and status == ("ready" if place == "the end" else "reading") and len(notified) > 2:
            raise RuntimeError("a fault")
        tell(documents, document, status)

    places: dict[str, tuple[Any, str, Any]] = {
        "tokens": (HeldDocuments, "_seq", failing),
        "the queue": (held.llm.loop, "submit", failing),
        "progress": (HeldDocuments, "_notify", silent),
        "the end": (HeldDocuments, "_notify", silent),
        "keeping": (held_documents, "keep", failing),
        "a file that stays": (Path, "unlink", failing),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*places[place])
        held.add("a", text_of(300), kept)
        held.documents.ask("a", "about a")
        if place == "a file that stays":
            held.step(lambda: held.begun)
            kept.touch()
            held.documents.forget("a")
        else:
            held.step(lambda: held.refused)
            assert held.of("a")[-1]["status"] == "failed"
            assert held.refused[0][1].endswith("; the log has the reason.")
    held.add("b", text_of(300))
    held.documents.ask("b", "about b")
    held.step(lambda: "about b" in held.begun)
    assert held.of("b")[-1]["status"] == "ready"


def test_a_damaged_file_that_cannot_be_deleted_is_left_and_the_text_is_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, kept, read = Held(model), tmp_path / "a.kvsift", list[EngineSequence]()

    def source_of(path: Path, _: LLM, seq: EngineSequence) -> Callable[[Any], None]:
        read.append(seq)
        return lambda cache: (_ for _ in ()).throw(OSError("damaged"))

    def failing(*_: Any, **options: Any) -> None:
        raise PermissionError("not yours")

    kept.touch()
    monkeypatch.setattr(held_documents, "source_of", source_of)
    monkeypatch.setattr(Path, "unlink", failing)
    held.add("a", text_of(300), kept)
    held.step(lambda: held.of("a") and held.of("a")[-1]["status"] == "ready")
    assert len(read) == 1
