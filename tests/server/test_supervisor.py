"""The engine process is watched, replaced and ended, with one that has no model."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvicorn
from refusals import refused

from kvsift.server.api_errors import ApiError
from kvsift.server.frames import AnswerRequest
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
            async with asyncio.timeout(180):  # CI may share its processors
                await supervisor.ready.wait()
                await test(supervisor)
        finally:
            supervisor.stop()
            await task
        assert supervisor._process.returncode is not None

    asyncio.run(run())
    return ended


def ask(supervisor: Supervisor, prompt: str) -> ServerJob:
    return supervisor.submit(AnswerRequest([prompt]))


def test_an_answer_goes_on_after_the_token_that_was_sent() -> None:
    async def test(supervisor: Supervisor) -> None:
        job = ask(supervisor, "begin")
        await job.wait_ended()
        assert (job.crashes, job.answers[0].ids, job.take()[0].text) == (0, [1, 2], "one two")
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


def test_a_request_that_was_only_beside_two_crashes_has_its_answer(capfd: pytest.CaptureFixture[str]) -> None:
    """It gets further after each crash, and the other one, with which the engine dies, does not."""

    async def test(supervisor: Supervisor) -> None:
        beside, deadly = ask(supervisor, "slow"), ask(supervisor, "die")
        with pytest.raises(ApiError, match="died twice with this request, and with no other one running"):
            await deadly.wait_ended()
        while supervisor.state != "ready":
            await asyncio.sleep(0.01)
        after = ask(supervisor, "answer")
        await after.wait_ended()
        assert after.take()[0].text == "one two"
        assert (beside.error, beside.answers[0].ids) == (None, [0, 1, 2])
        os.kill(supervisor.pid or 0, signal.SIGKILL)
        await beside.wait_ended()
        assert beside.take()[0].text == "0 1 2 3 "
        assert supervisor.restarts == 4

    assert [job.crashes for job in supervised(test)] == [3, 0, 0]
    assert "what was in two crashes is tried alone" in capfd.readouterr().err


def test_a_request_that_was_not_begun_in_two_crashes_is_tried_alone_and_others_wait() -> None:
    async def test(supervisor: Supervisor) -> None:
        beside, deadly = ask(supervisor, "wait"), ask(supervisor, "die")
        with pytest.raises(ApiError, match="died twice"):
            await deadly.wait_ended()
        while supervisor.state != "ready":
            await asyncio.sleep(0.01)
        after = ask(supervisor, "answer")
        await asyncio.sleep(0.1)
        assert (beside.error, beside.is_sent) == (None, True)
        assert (after.is_sent, after.prompt_tokens) == (False, None)
        supervisor.release(beside)  # its client has left
        await after.wait_ended()
        assert supervisor.restarts == 3

    supervised(test)


@pytest.mark.parametrize("text", ["die", "die unheard"])
def test_a_document_that_kills_two_engines_fails_and_a_question_beside_it_does_not(text: str) -> None:
    async def test(supervisor: Supervisor) -> None:
        beside, owner = ask(supervisor, "slow"), ("me", "")
        deadly = supervisor.documents.add("a", text, 3, owner)
        while deadly.status == "reading":
            await asyncio.sleep(0.01)
        assert deadly.error is not None
        assert "died while it read this document alone" in deadly.error
        seen = len(beside.answers[0].ids)  # what was under way may have been lost with an engine
        while len(beside.answers[0].ids) < 4:  # each engine sends one
            if len(beside.answers[0].ids) > seen:
                seen = len(beside.answers[0].ids)
                assert supervisor.pid is not None
                os.kill(supervisor.pid, signal.SIGKILL)
            await asyncio.sleep(0.01)
        await beside.wait_ended()
        assert beside.take()[0].text == "0 1 2 3 "
        while supervisor.state != "ready":
            await asyncio.sleep(0.01)
        other = supervisor.documents.add("b", "a text", 6, owner)
        while other.status == "reading":
            await asyncio.sleep(0.01)
        assert other.status == "ready"

    supervised(test)


def test_an_engine_without_a_sign_of_life_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsift.server.supervisor.HEARTBEAT_TIMEOUT_S", 0.5)

    async def test(supervisor: Supervisor) -> None:
        first = supervisor.pid
        with pytest.raises(ApiError, match="died twice"):
            await ask(supervisor, "hang").wait_ended()
        assert supervisor.pid != first

    supervised(test)


def test_an_engine_that_never_gets_ready_is_an_error() -> None:
    supervisor = Supervisor(ServerSettings(model={"model": "bad"}), print)
    with refused("failed_process"):
        asyncio.run(supervisor.run())


def test_the_queue_is_full_and_has_room_again() -> None:
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
    """Nothing was read of any, as they came 20 ms apart; three sequences are free."""

    async def test(supervisor: Supervisor) -> None:
        for number, waiting in enumerate((0, 0, 0, 1, 2)):
            ask(supervisor, "wait")
            assert (supervisor.num_waiting, supervisor.num_running) == (waiting, number + 1 - waiting)
        with pytest.raises(ApiError, match="2 requests are waiting already"):
            ask(supervisor, "wait")

    supervised(test, max_waiting=2, model={"max_seqs": 3})


def test_a_request_of_more_answers_than_rows_are_free_waits() -> None:
    async def test(supervisor: Supervisor) -> None:
        supervisor.submit(AnswerRequest(["wait"], num_samples=2))
        assert supervisor.num_waiting == 0
        supervisor.submit(AnswerRequest(["wait"], num_samples=2))
        assert supervisor.num_waiting == 1

    supervised(test, model={"max_seqs": 3})


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
