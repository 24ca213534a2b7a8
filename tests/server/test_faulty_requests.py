"""One request cannot end another: at every place between the logits and the client one fails beside a second one."""

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine.tiny_directory import text_of
from server.faulty_worker import PLACES, seed_of
from server.serving import PLAN

import kvsift
from kvsift.server import answer_routes, answers, streams
from kvsift.server.answers import AnswerForm
from kvsift.server.app import application
from kvsift.server.jobs import ServerJob
from kvsift.server.metrics import Metrics
from kvsift.server.served_document import ServedDocument
from kvsift.server.settings import ServerSettings
from kvsift.server.supervisor import Supervisor

FAULTY = 500  # seed of the request that fails in this process
BY_JOB: Callable[..., int] = lambda job, *_: job.request.sampling["seed"]  # noqa: E731
BY_FORM: Callable[..., int] = lambda form, *_: form._request.seed  # noqa: E731
# by place: what fails there, for the request with which seed, and whether it is streamed
SERVER_PLACES: dict[str, tuple[Any, str, Callable[..., int], bool]] = {
    "the message to the engine": (answer_routes, "_answer_request", lambda body, *_: body.seed, False),
    "the request is accepted": (ServerJob, "accept", BY_JOB, False),
    "news of a whole answer": (ServerJob, "add", BY_JOB, False),
    "news of a stream": (ServerJob, "add", BY_JOB, True),
    "a whole answer": (AnswerForm, "whole", BY_FORM, False),
    "its log-probabilities": (AnswerForm, "_logprobs", BY_FORM, False),
    "its usage": (answers, "usage", lambda _, body: body.seed, False),
    "pieces of a stream": (ServerJob, "take", BY_JOB, True),
    "events of a stream": (AnswerForm, "chunks", BY_FORM, True),
    "log-probabilities of a stream": (AnswerForm, "_logprobs", BY_FORM, True),
    "a comment in a stream": (streams, "_comment", BY_JOB, True),
    "usage of a stream": (answers, "usage", lambda _, body: body.seed, True),
    "the end of a stream": (AnswerForm, "last", BY_FORM, True),
}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
BESIDE = {"prompt": "Stop", "max_tokens": 800, "temperature": 0.7, "seed": 1000}
AFTER = {"prompt": "Hello", "max_tokens": 3}
OPTIONS = {"device": "cpu", "chunk_size": 64, "dense_below": 0}


class Running:
    """A server in this process, over an engine process whose requests fail where their seeds say."""

    def __init__(self, model: Path, runner: asyncio.Runner) -> None:
        self._runner = runner
        metrics = Metrics()
        settings = ServerSettings(model={"model": str(model), **OPTIONS}, plan=PLAN, threads=1)
        self.supervisor = Supervisor(settings, lambda job: metrics.ended(job))
        metrics.follow(self.supervisor)
        transport = httpx.ASGITransport(application(settings, self.supervisor, metrics), raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60)
        self.expected: dict[str, str] = {}

    async def post(self, body: dict[str, Any]) -> httpx.Response:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        return await self.client.post(path, json=body)

    def beside(self, work: Callable[[], Any]) -> Any:
        """Do some work while another request is answered; its answer, and that of one afterwards, must be as alone."""

        async def run() -> Any:
            before, restarts = self.supervisor.pid, self.supervisor.restarts
            other = asyncio.create_task(self.post(BESIDE))
            async with asyncio.timeout(60):
                while not any(job.first_token for job in self.supervisor._jobs.values()):
                    await asyncio.sleep(0.001)
                done = await work()
                assert not other.done(), "nothing was beside it"
                after = await self.post(AFTER)
                answers = [response.json()["choices"][0]["text"] for response in (await other, after)]
            assert answers == [self.expected["beside"], self.expected["after"]]
            assert (self.supervisor.pid, self.supervisor.restarts) == (before, restarts)
            assert self.supervisor._jobs == {}
            return done

        return self._runner.run(run())

    async def document(self, text: str) -> str:
        """The id of a document that was read."""
        added = (await self.client.post("/v1/documents", json={"text": text, "name": "a"})).json()
        while (await self.client.get(f"/v1/documents/{added['id']}")).json()["status"] == "reading":
            await asyncio.sleep(0.02)
        return str(added["id"])


@pytest.fixture(scope="module")
def running(model: Path, alone: kvsift.LLM) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        worker = sys.executable, str(Path(__file__).parent / "faulty_worker.py")
        patch.setattr("kvsift.server.supervisor.WORKER", worker)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        running = Running(model, runner)

        async def start() -> asyncio.Task[None]:
            task = asyncio.create_task(running.supervisor.run())
            async with asyncio.timeout(60):
                await running.supervisor.ready.wait()
            running.id = await running.document(text_of(300))  # type: ignore[attr-defined]
            return task

        task = runner.run(start())
        sampling = kvsift.Sampling(BESIDE["temperature"], seed=BESIDE["seed"])
        beside = alone.generate(BESIDE["prompt"], max_new_tokens=BESIDE["max_tokens"], sampling=sampling)
        running.expected = {"beside": beside.text, "after": alone.generate("Hello", max_new_tokens=3).text}
        yield running
        running.supervisor.stop()

        async def end() -> None:
            await task

        runner.run(end())


def body_of(place: str, running: Running) -> dict[str, Any]:
    """A request that passes a place of the engine process."""
    body: dict[str, Any] = {"prompt": text_of(90), "max_tokens": 12, "seed": seed_of(place)}
    if place in ("the passages", "a selection is recorded"):
        del body["prompt"]
        question = {"messages": [{"role": "user", "content": "What?"}], "document": running.id}  # type: ignore[attr-defined]
        return {**body, **question, "sparsity": {"passages": True}}
    if "log-prob" in place:
        return {**body, "logprobs": 2}
    if "draft" in place:
        return {**body, "sparsity": {"exact": True}}
    return body


def error_of(response: httpx.Response) -> tuple[int, str]:
    """Status and message of the error with which an answer has ended, streamed or not."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return response.status_code, response.json()["error"]["message"]
    last = response.text.removesuffix("\n\n").rpartition("\n\n")[2]
    return response.status_code, json.loads(last.removeprefix("data: "))["error"]["message"]


@pytest.mark.parametrize(("place", "stream"), [(place, index % 2 > 0) for index, place in enumerate(PLACES)])
def test_a_request_that_fails_in_the_engine_ends_alone(place: str, stream: bool, running: Running) -> None:
    response = running.beside(lambda: running.post({**body_of(place, running), **(STREAM if stream else {})}))
    status, message = error_of(response)
    assert status in (500, 200 if stream else 500), response.text  # a stream may have begun
    if "logit" in place:
        assert "no token can be chosen for token" in message
        assert ("all logits of the model are -inf" if "minus" in place else " logits of the model are NaN") in message
    else:
        assert message.endswith("; the log has the reason.")


def fail(patch: pytest.MonkeyPatch, owner: Any, name: str, is_due: Callable[..., bool]) -> list[object]:
    """Let a function fail for some arguments; returns a list that is empty until it has."""
    old, failed = getattr(owner, name), list[object]()

    def failing(*args: Any, **options: Any) -> Any:
        if is_due(*args):
            failed.append(args)
            raise RuntimeError("a fault")
        return old(*args, **options)

    patch.setattr(owner, name, failing)
    return failed


@pytest.mark.parametrize("place", SERVER_PLACES)
def test_a_request_that_fails_in_the_server_process_ends_alone(
    place: str, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, seed, stream = SERVER_PLACES[place]
    monkeypatch.setattr(streams, "COMMENT_S", 0.001)
    failed = fail(monkeypatch, owner, name, lambda *args: seed(*args) == FAULTY)
    body = {"prompt": text_of(90), "max_tokens": 12, "seed": FAULTY, "logprobs": 1, **(STREAM if stream else {})}
    status, message = error_of(running.beside(lambda: running.post(body)))
    assert failed
    assert status in (500, 200 if stream else 500)
    assert message.endswith("log has the reason.")


def test_a_request_that_cannot_be_counted_has_its_answer(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = fail(monkeypatch, Metrics, "ended", lambda _, job: job.request.sampling["seed"] == FAULTY)
    response = running.beside(lambda: running.post({**AFTER, "seed": FAULTY}))
    assert failed
    assert response.json()["choices"][0]["text"] == running.expected["after"]


@pytest.mark.parametrize("place", ["news", "events"])
def test_a_document_that_fails_in_the_server_process_ends_alone(
    place: str, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"The {place}. " + text_of(200)

    if place == "news":
        update = ServedDocument.update

        def failing(document: ServedDocument, **news: Any) -> None:
            if document.text == text and news["status"] == "ready":
                raise RuntimeError("a fault")
            update(document, **news)

        monkeypatch.setattr(ServedDocument, "update", failing)

    async def work() -> tuple[str, httpx.Response]:
        key = await running.document(text)
        status = (await running.client.get(f"/v1/documents/{key}")).json()["status"]
        if place == "events":
            fail(monkeypatch, ServedDocument, "as_dict", lambda document: document.text == text)
        events = await running.client.get(f"/v1/documents/{key}/events")
        monkeypatch.undo()
        await running.client.delete(f"/v1/documents/{key}")
        return status, events

    status, response = running.beside(work)
    assert status == ("failed" if place == "news" else "ready")
    assert response.status_code == 200
    assert "log has the reason" in response.text
