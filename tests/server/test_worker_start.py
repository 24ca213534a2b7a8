"""What the engine process does before it is ready."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from kvsift.checkpoint import fingerprint
from kvsift.plan.syntax import parse_plan
from kvsift.plan.tuned_plan import FILE, TunedPlan, write
from kvsift.server.worker import Worker


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
    told = capsys.readouterr().err
    assert "kvsift: memory for 1,1" in told
    assert "36 captured steps" in told
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
