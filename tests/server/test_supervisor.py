"""The engine process is watched, replaced and ended, with one that has no model."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvicorn

from kvsift.errors import InputError
from kvsift.server.api_errors import ApiError
from kvsift.server.jobs import ServerJob
from kvsift.server.run import Ending
from kvsift.server.settings import ServerSettings
from kvsift.server.supervisor import Supervisor


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = sys.executable, str(Path(__file__).parent / "fake_worker.py")
    monkeypatch.setattr("kvsift.server.supervisor.WORKER", worker)


def supervised(test: Callable[[Supervisor], Awaitable[None]], **settings: object) -> list[ServerJob]:
    """Run a test beside a supervisor; returns the requests that have ended."""
    ended: list[ServerJob] = []

    async def run() -> None:
        supervisor = Supervisor(ServerSettings(**settings), ended.append)  # type: ignore[arg-type]
        task = asyncio.create_task(supervisor.run())
        try:
            async with asyncio.timeout(20):
                await supervisor.ready.wait()
                await test(supervisor)
        finally:
            supervisor.stop()
            await task
        assert supervisor._process is not None
        assert supervisor._process.returncode is not None

    asyncio.run(run())
    return ended


def ask(supervisor: Supervisor, prompt: str) -> ServerJob:
    return supervisor.submit({"prompts": [prompt]}, 1)


def test_an_answer_goes_on_after_the_token_that_was_sent() -> None:
    async def test(supervisor: Supervisor) -> None:
        job = ask(supervisor, "begin")
        await job.wait_ended()
        assert (job.crashes, job.answers[0].ids, job.take()[0].text) == (1, [1, 2], "one two")
        assert supervisor.restarts == 1

    assert len(supervised(test)) == 1


def test_a_request_that_kills_two_engines_ends_and_others_do_not() -> None:
    async def test(supervisor: Supervisor) -> None:
        job = ask(supervisor, "die")
        with pytest.raises(ApiError, match="died twice") as lost:
            await job.wait_ended()
        assert (lost.value.status, lost.value.code) == (500, "engine_lost")
        while supervisor.state != "ready":
            with pytest.raises(ApiError, match="the server is restarting"):
                ask(supervisor, "answer")
            await asyncio.sleep(0.01)
        other = ask(supervisor, "answer")
        await other.wait_ended()
        assert other.take()[0].text == "one two"

    assert [job.crashes for job in supervised(test)] == [2, 0]


def test_an_engine_without_a_sign_of_life_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsift.server.supervisor.SILENCE_S", 0.5)

    async def test(supervisor: Supervisor) -> None:
        first = supervisor.pid
        with pytest.raises(ApiError, match="died twice"):
            await ask(supervisor, "hang").wait_ended()
        assert supervisor.pid != first

    supervised(test)


def test_an_engine_that_never_gets_ready_is_an_error() -> None:
    supervisor = Supervisor(ServerSettings(model={"model": "bad"}), print)
    with pytest.raises(InputError, match="ends before it is ready"):
        asyncio.run(supervisor.run())


def test_the_line_is_full_and_has_room_again() -> None:
    async def test(supervisor: Supervisor) -> None:
        jobs = [ask(supervisor, "answer") for _ in range(2)]
        with pytest.raises(ApiError, match="2 requests are waiting already") as full:
            ask(supervisor, "answer")
        assert (full.value.status, full.value.retry_after) == (429, 1)
        supervisor.release(jobs[0])  # its client has left
        ask(supervisor, "answer")
        await jobs[1].wait_ended()

    supervised(test, max_waiting=2)


def test_requests_for_which_rows_are_free_do_not_wait() -> None:
    """Nothing was read of any, as they came 20 ms apart; three rows are free."""

    async def test(supervisor: Supervisor) -> None:
        for number, waiting in enumerate((0, 0, 0, 1, 2)):
            ask(supervisor, "wait")
            assert (supervisor.num_waiting, supervisor.num_running) == (waiting, number + 1 - waiting)
        with pytest.raises(ApiError, match="2 requests are waiting already"):
            ask(supervisor, "wait")

    supervised(test, max_waiting=2, model={"rows": 3})


def test_a_request_of_more_answers_than_rows_are_free_waits() -> None:
    async def test(supervisor: Supervisor) -> None:
        supervisor.submit({"prompts": ["wait"]}, 2)
        assert supervisor.num_waiting == 0
        supervisor.submit({"prompts": ["wait"]}, 2)
        assert supervisor.num_waiting == 1

    supervised(test, model={"rows": 3})


def test_a_second_signal_ends_answers_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    async def test(supervisor: Supervisor) -> None:
        job, web = ask(supervisor, "hang"), uvicorn.Server(uvicorn.Config(print))
        ending = Ending(web, supervisor, 30.0)
        ending.begin(signal.SIGINT)
        await asyncio.sleep(0.05)
        assert (supervisor.state, job.error, web.should_exit) == ("draining", None, False)
        ending.begin(signal.SIGINT)
        assert (ending.code, web.force_exit) == (130, True)
        with pytest.raises(ApiError, match="shutting down"):
            await job.wait_ended()

    supervised(test)
    assert "finishing answers, 1 in progress; once more ends them" in capsys.readouterr().err
