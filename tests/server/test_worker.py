"""The engine process: before it is ready, and requests that are cancelled or refused before they run."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsift.checkpoint import fingerprint
from kvsift.engine.sequence import Sequence
from kvsift.errors import InputError
from kvsift.plan.syntax import parse_plan
from kvsift.plan.tuned_plan import FILE, TunedPlan, write
from kvsift.server.frames import AnswerRequest
from kvsift.server.worker import OpenSequence, Worker


@pytest.fixture
def worker(model: Path) -> Iterator[Worker]:
    """A worker whose other side reads nothing."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        options = {"model": str(model), "device": "cpu", "chunk_size": 64, "path": "composed"}
        yield Worker(ours, {"model": options, "plans": ["dense"], "keep_tokens": 640, "reserve_tokens": 0})


def message(key: int, **fields: Any) -> dict[str, Any]:
    """A request for completions."""
    request = AnswerRequest(**{"prompts": [[5, 6, 7]], "max_tokens": 4, **fields})
    return {"op": "submit", "id": key, "request": vars(request), "sent": {}, "ended": []}


def test_a_question_that_is_cancelled_between_its_document_and_the_loop_does_not_run(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[OpenSequence] = []
    monkeypatch.setattr(worker._documents, "ask", lambda _, opened: asked.append(opened))
    for key in (1, 2):
        worker._take(message(key, document="a"))
    worker._take({"op": "cancel", "id": 1})
    for opened in asked:  # the document is read
        worker._begin(opened)
    assert [opened.request for opened in worker._seqs] == [2]
    assert worker._llm.loop.seqs == [asked[1].seq]
    worker._take({"op": "cancel", "id": 2})
    assert not worker._seqs + worker._waiting
    assert not worker._llm.loop.seqs


@pytest.mark.parametrize(("ignore_eos", "stops"), [(False, ("never", "\n")), (True, ("never",))])
def test_ignore_eos_ignores_the_stop_of_a_chat_without_a_template(
    worker: Worker, ignore_eos: bool, stops: tuple[str, ...]
) -> None:
    worker._llm.tokenizer.chat_template = None
    messages = [{"role": "user", "content": "Who?"}]
    worker._take(message(1, prompts=[], messages=messages, ignore_eos=ignore_eos, options={"stop": ["never"]}))
    [opened] = worker._seqs
    assert tuple(opened.reply.transcript.request.stops) == stops


@pytest.mark.parametrize(("ignore_eos", "stops"), [(False, ("never", "###")), (True, ("never",))])
def test_ignore_eos_ignores_the_stop_strings_of_the_checkpoint(
    worker: Worker, ignore_eos: bool, stops: tuple[str, ...]
) -> None:
    worker._llm.load()
    assert worker._llm._settings is not None
    worker._llm._settings.stops = ("###",)
    worker._take(message(1, ignore_eos=ignore_eos, options={"stop": ["never"]}))
    [opened] = worker._seqs
    assert tuple(opened.reply.transcript.request.stops) == stops


def test_no_other_sample_of_a_request_runs_that_the_queue_has_no_room_for(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[Sequence] = []

    def full(row: Sequence) -> None:
        submitted.append(row)
        raise InputError("too many requests are waiting.")

    monkeypatch.setattr(worker._llm.loop, "submit", full)
    worker._take(message(1, num_samples=3))
    assert len(submitted) == 1
    assert not worker._seqs + worker._waiting


def pages(model: Path, path: str, **settings: Any) -> int:
    """Pages that a new worker has."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        options = {"model": str(model), "device": "cpu", "chunk_size": 64, "path": path}
        plans = ["quest:budget=96:window=32", "sketch:budget=80", "dense"]
        worker = Worker(ours, {"model": options, "plans": plans, "keep_tokens": 640, **settings})
        return sum(worker._llm.loop.counts()["pages"].values())


def test_memory_is_allocated_and_steps_are_captured_before_the_first_request(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 1000 <= 16 * pages(model, "eager", reserve_tokens=1000) < 1200
    log = capsys.readouterr().err
    assert "kvsift: memory for 1,1" in log
    assert "36 captured steps" in log
    assert 16 * pages(model, "eager", reserve_tokens=None) > 8 * 4096


@pytest.mark.parametrize(("path", "reserve_tokens"), [("eager", 0), ("composed", None)])
def test_nothing_is_allocated_that_was_not_asked_for_or_has_no_use(
    path: str, reserve_tokens: int | None, model: Path
) -> None:
    assert pages(model, path, reserve_tokens=reserve_tokens) == 0


def test_a_server_that_cannot_warm_up_says_so_and_serves(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no memory for graphs")

    monkeypatch.setattr("kvsift.api.llm.warm_up", fail)
    assert pages(model, "eager", reserve_tokens=None) == 0
    assert "first requests wait (RuntimeError: no memory for graphs)" in capsys.readouterr().err


def test_plans_named_auto_are_those_that_were_tuned_for_the_model(model: Path, tmp_path: Path) -> None:
    tuned = shutil.copytree(model, tmp_path / "model")
    write(tuned / FILE, TunedPlan(parse_plan("quest:budget=112"), "tiny", fingerprint(tuned), "cpu"))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        options = {"model": str(tuned), "device": "cpu", "chunk_size": 64}
        settings = {"plans": ["sketch:budget=80", "auto", "dense"], "keep_tokens": 640, "reserve_tokens": 0}
        worker = Worker(ours, {"model": options, **settings})
        assert [str(plan) for plan in worker._plans] == ["sketch:budget=80", "quest:budget=112", "dense"]
