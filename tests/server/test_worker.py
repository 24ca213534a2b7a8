"""The engine process: before it is ready, and requests that are cancelled or refused before they run."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, Generic

import pytest
from engine.tiny_directory import write_model

from kvsift import LLM
from kvsift.checkpoint import fingerprint
from kvsift.engine.loop import Loop
from kvsift.engine.request import Request
from kvsift.engine.sequence import EngineSequence
from kvsift.errors import InputError
from kvsift.plan.syntax import parse_plan
from kvsift.plan.tuned_plan import FILE, TunedPlan, write
from kvsift.server import frames, worker
from kvsift.server.frames import AnswerRequest
from kvsift.server.held_documents import Question
from kvsift.server.worker import Worker
from kvsift.tokenization.growing_text import GrowingText


class Served:
    """A worker, what it is sent, and what it sends.

    Args:
        settings: of the worker; "dense" without reserved memory by default.
    """

    def __init__(self, model: Path, path: str = "composed", dense_below: int = 0, **settings: Any) -> None:
        ours, theirs = socket.socketpair()
        options = {"model": str(model), "device": "cpu", "chunk_size": 64, "path": path, "dense_below": dense_below}
        defaults = {"plans": ["dense"], "keep_tokens": 640, "reserve_tokens": 0}
        self._worker = Worker(ours, {"model": options, **defaults, **settings})
        self._sent = theirs.makefile("rb")

    def take(self, *messages: dict[str, Any]) -> None:
        """Take messages, and no more."""
        self._worker.run(BytesIO(b"".join(map(frames.pack, messages))))

    def until(self, is_last: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """What is sent until a message that is the last."""
        received: list[dict[str, Any]] = []
        while not received or not is_last(received[-1]):
            message = frames.receive(self._sent)
            assert message is not None
            received.append(message)
        return received


@pytest.fixture(autouse=True)
def one_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "HEARTBEAT_S", 1e6)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Requests of the sequences that are made."""
    made: list[Request] = []
    request = LLM.request

    def kept(*arguments: Any, **options: Any) -> Request:
        made.append(request(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(LLM, "request", kept)
    return made


def message(key: int, **fields: Any) -> dict[str, Any]:
    """A request for completions."""
    request = AnswerRequest(**{"prompts": [[5, 6, 7]], "max_tokens": 4, **fields})
    return {"op": "submit", "id": key, "request": vars(request), "sent": {}, "ended": []}


def ends(received: dict[str, Any], key: int) -> bool:
    """Whether a message has the end of a request."""
    return received["op"] == "step" and any(each["id"] == key and "finish" in each for each in received["news"])


def test_a_question_that_is_cancelled_between_its_document_and_the_loop_does_not_run(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SlowDocuments(Generic[Question]):
        """Documents that are ready when one of them is forgotten."""

        def __init__(self, llm: LLM, form: object, plan: object, send: object, begin: Any, _: object):
            self._begin, self._asked = begin, list[Any]()

        def text(self, key: str) -> tuple[str, GrowingText]:
            return "", GrowingText()

        def ask(self, key: str, question: Any) -> None:
            self._asked.append(question)

        def forget(self, key: str) -> None:
            for question in self._asked:
                self._begin(question)

        def report(self) -> None:
            pass

    monkeypatch.setattr(worker, "HeldDocuments", SlowDocuments)
    served = Served(model)
    questions = [message(key, document="a") for key in (1, 2)]
    served.take(*questions, {"op": "cancel", "id": 1}, {"op": "forget", "document": "a"})
    received = served.until(lambda each: ends(each, 2))
    assert {news["id"] for each in received if each["op"] == "step" for news in each["news"]} == {2}


def test_captured_steps_know_themselves_where_they_are_dense(model: Path, requests: list[Request]) -> None:
    served = Served(model, "eager", 900, plans=["quest:budget=128"])
    for key, options in enumerate([{}, {"logprobs": 0}]):
        served.take(message(key, options=options))
        served.until(lambda each, key=key: ends(each, key))
    assert [request.plan.decode.budget.min_context for request in requests if request.plan.decode] == [0, 900]


CHAT: dict[str, Any] = {"prompts": [], "messages": [{"role": "user", "content": "Who?"}]}


@pytest.mark.parametrize(("asked", "settings", "own"), [(CHAT, {}, "\n"), ({}, {"stop_strings": ["###"]}, "###")])
def test_ignore_eos_ignores_the_stop_of_a_chat_without_a_template_and_those_of_the_checkpoint(
    asked: dict[str, Any], settings: dict[str, Any], own: str, tmp_path: Path, requests: list[Request]
) -> None:
    (write_model(tmp_path) / "generation_config.json").write_text(json.dumps(settings))
    for ignore_eos in (False, True):
        served = Served(tmp_path)
        served.take(message(1, ignore_eos=ignore_eos, options={"stop": ["never"]}, **asked))
        served.until(lambda each: ends(each, 1))
    assert [tuple(request.stops) for request in requests] == [("never", own), ("never",)]


def test_no_other_sample_of_a_request_runs_that_the_queue_has_no_room_for(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[EngineSequence] = []

    def full(loop: Loop, seq: EngineSequence) -> None:
        submitted.append(seq)
        raise InputError("too many requests are waiting.")

    monkeypatch.setattr(Loop, "submit", full)
    served = Served(model)
    served.take(message(1, num_samples=3))
    *_, refused = served.until(lambda each: each["op"] == "refused")
    assert (refused["id"], refused["status"]) == (1, 429)
    assert len(submitted) == 1


def pages(model: Path, path: str, **settings: Any) -> int:
    """Pages that a new worker has."""
    served = Served(model, path, plans=["quest:budget=96:window=32", "sketch:budget=80", "dense"], **settings)
    served.take()
    *_, heartbeat = served.until(lambda each: each["op"] == "heartbeat")
    return sum(heartbeat["pages"].values())


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
    served = Served(tuned, plans=["sketch:budget=80", "auto", "dense"])
    served.take()
    ready, *_ = served.until(lambda each: each["op"] == "heartbeat")
    assert ready["plans"] == ["sketch:budget=80", "quest:budget=112", "dense"]
