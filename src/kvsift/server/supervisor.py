"""The engine process, from the server's side: started, watched, and started again when it dies.

Requests outlive it: they are submitted to the next one, which continues after the tokens that were sent. Those that
were in two crashes are tried alone, one by one, and the one with which the engine dies again ends with an error.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys
import traceback
from asyncio.subprocess import DEVNULL, Process, create_subprocess_exec
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from kvsift.errors import FailedProcess, InputError
from kvsift.server import frames
from kvsift.server.api_errors import ApiError, unavailable
from kvsift.server.document_files import DocumentFiles
from kvsift.server.documents import ENGINE_LOST as DOCUMENT_LOST
from kvsift.server.documents import Documents
from kvsift.server.frames import AnswerRequest
from kvsift.server.jobs import ServerJob
from kvsift.server.served_document import ServedDocument
from kvsift.server.settings import KEY_VARIABLE, PlanList, ServerSettings
from kvsift.server.tool_calls import Dialect

WORKER = sys.executable, "-m", "kvsift.server.worker"
HEARTBEAT_TIMEOUT_S = 60.0  # after which the engine is replaced
LOADING_S = 3600.0  # for a model to be downloaded and loaded
STEP_S = 600.0  # of one step: it hangs
TRIES = 3  # restarts in a row that never become ready
ENGINE_LOST = "the engine process died twice with this request, and with no other one running. It is not tried again."


class Supervisor:
    """Requests over an engine process.

    Args:
        settings: settings of the server.
        on_end: called with every request that has ended, or was cancelled.

    Attributes:
        state: "loading", "ready", "restarting" or "draining".
        names: names of the served model, the first one in answers; none until it is loaded.
        positions: number of positions of the model; None: unlimited.
        plans: plans that requests may name.
        restarts: number of restarts of the engine.
        pid: process id of the engine process.
        gauges: sequences by state, pages and bytes of states by owner in the engine, as of its last heartbeat.
        documents: documents that clients have uploaded.
        dialect: what answers of the model have besides text.
    """

    def __init__(self, settings: ServerSettings, on_end: Callable[[ServerJob], None]) -> None:
        self._settings, self._on_end = settings, on_end
        self._jobs: dict[int, ServerJob] = {}
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._keys = itertools.count(1)
        self._process: Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._is_ready = self._is_draining = self._is_stopping = False
        self._tries_alone = False  # a request or a document; the others wait
        self._idle = asyncio.Event()
        self._idle.set()
        self._mean_s = 1.0  # of recent requests
        self.ready = asyncio.Event()
        files = None if settings.documents is None else DocumentFiles(settings.documents)
        self.documents = Documents(self._send, files, settings.salts)
        self.names, self.positions, self.plans, self.restarts = list[str](), None, PlanList([], []), 0
        self.dialect = Dialect()
        self.gauges: dict[str, dict[str, int]] = {}
        self._num_sequences = 0

    @property
    def state(self) -> str:
        """What the server does."""
        if self._is_draining:
            return "draining"
        if self._is_ready:
            return "ready"
        return "restarting" if self.ready.is_set() else "loading"

    @property
    def pid(self) -> int | None:
        """The engine process."""
        return None if self._process is None else self._process.pid

    @property
    def num_waiting(self) -> int:
        """Requests for which the engine has no sequence yet: of those whose prefill has not begun, the first are about
        to begin if places are free."""
        queued = [job.num_open for job in self._jobs.values() if job.num_prefilled is None]
        free = self._num_sequences - sum(job.num_open for job in self._jobs.values() if job.num_prefilled is not None)
        return sum(taken > free for taken in itertools.accumulate(queued))

    @property
    def num_running(self) -> int:
        """Requests in prefill or decode."""
        return len(self._jobs) - self.num_waiting

    def check_open(self) -> None:
        """Refuse a request if none are taken (``ApiError``)."""
        if self.state != "ready":
            raise unavailable(self.state, 2 if self.state == "restarting" else 5)
        if (waiting := self.num_waiting) >= self._settings.max_waiting:
            seconds = max(1, min(60, round(self._mean_s * (waiting + self.num_running) / 8)))
            text = f"{waiting} requests are waiting already. Try again in {seconds} s."
            raise ApiError(429, text, "rate_limit_exceeded", retry_after=seconds)

    def submit(self, request: AnswerRequest) -> ServerJob:
        """Send a request to the engine.

        Raises:
            ApiError: if none are taken at the moment.
        """
        self.check_open()
        job = ServerJob(next(self._keys), request)
        self._jobs[job.key] = job
        self._idle.clear()
        self._send_pending()
        return job

    async def convert(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return what the engine answers to a message about texts and tokens.

        Raises:
            ApiError: if it refuses it, or takes none at the moment.
        """
        self.check_open()
        key = next(self._keys)
        self._asked[key] = asyncio.get_running_loop().create_future()
        self._send({**message, "id": key})
        try:
            return await self._asked[key]
        finally:
            del self._asked[key]

    def _send_pending(self) -> None:
        """Send the engine the documents and requests that it does not have. What was in two crashes, without progress
        since, is sent alone first: of the most crashes the latest, as what came last is the likeliest cause."""
        if not self._is_ready:
            return
        candidates: list[ServedDocument | ServerJob] = [*self.documents.unread.values(), *self._jobs.values()]
        suspects = [each for each in candidates if each.crashes > 1]
        if suspects and not self._tries_alone:
            print("kvsift: what was in two crashes is tried alone, and other requests wait.", file=sys.stderr)
        self._tries_alone = bool(suspects)
        suspect = max(reversed(suspects), key=lambda each: each.crashes, default=None)
        if suspect is None:
            jobs, keys = list(self._jobs.values()), None
        elif isinstance(suspect, ServerJob):
            jobs, keys = [suspect], [suspect.request.document]
        else:
            jobs, keys = [], [suspect.key]
        self.documents.resend(keys)
        for job in jobs:
            if not job.is_sent:
                job.is_sent = True
                self._attempt(job, partial(self._send, job.message()))

    def _blame(self) -> None:
        """Count the crash of the engine for what was running. What has crashed it twice, and alone this time, fails."""
        unread = self.documents.unread  # questions about these are queued
        running = [job for job in self._jobs.values() if job.is_sent and job.request.document not in unread]
        reading = self.documents.crashed()
        for job in self._jobs.values():
            job.crashed(job in running)
        if len(running) + len(reading) > 1:
            return
        for document in reading:
            if document.crashes > 1:
                document.update(status="failed", error=DOCUMENT_LOST, pinned=False)
        for job in running:
            if job.crashes > 1:
                job.fail(ApiError(500, ENGINE_LOST, "engine_lost"))
                self._forget(job)

    def release(self, job: ServerJob) -> None:
        """Forget a request whose client has its answer or has left; cancel the rest of the answer."""
        if self._jobs.get(job.key) is job and not job.is_ended:
            self._send({"op": "cancel", "id": job.key})
        self._forget(job)

    def _forget(self, job: ServerJob) -> None:
        was_open = self._jobs.pop(job.key, None) is not None
        if not self._jobs:
            self._idle.set()
        try:
            if was_open:
                self._on_end(job)
        except Exception:  # of what counts requests; the answer is whole
            traceback.print_exc()
        if was_open and self._tries_alone:
            self._send_pending()

    def _send(self, message: dict[str, Any]) -> bool:
        """Send a message to the engine process; returns whether there is one."""
        if self._writer is None:
            return False
        self._writer.write(frames.pack(message))
        return True

    async def drain(self, seconds: float) -> None:
        """Take no more requests, wait so long for those in progress, and end the rest."""
        self._is_draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        self.abort()

    def abort(self) -> None:
        """End all requests."""
        for job in list(self._jobs.values()):
            self._send({"op": "cancel", "id": job.key})
            job.fail(ApiError(503, "the server is shutting down; this answer is not complete.", "server_draining"))
            self._forget(job)

    def stop(self) -> None:
        """End the engine process, for good."""
        self._is_draining = self._is_stopping = True
        self.kill()

    def kill(self) -> None:
        """End the engine process."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):  # Process.kill() would take the exit code from asyncio
                os.kill(self._process.pid, signal.SIGKILL)

    async def run(self) -> None:
        """Keep an engine process alive until ``stop``.

        Raises:
            InputError: if the engine refuses the settings, or dies whenever it is started.
        """
        tries = 0
        while not self._is_stopping:
            was_ready = await self._run_engine()
            tries = 0 if was_ready else tries + 1
            if not self.ready.is_set() or tries == TRIES:
                if self._is_stopping:
                    return
                raise FailedProcess("the engine process exited before it was ready; see the log above.")
            self.restarts += not self._is_stopping

    async def _run_engine(self) -> bool:
        """Run one engine process until it exits. Returns whether it became ready."""
        ours, theirs = socket.socketpair()
        fd, environment = theirs.fileno(), {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
        self._process = await create_subprocess_exec(
            *WORKER, str(fd), pass_fds=[fd], stdin=DEVNULL, stdout=2,
            env=environment, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        became_ready = False
        try:
            self._send(self._settings.engine())
            while not self._is_stopping:
                async with asyncio.timeout(HEARTBEAT_TIMEOUT_S if self._is_ready else LOADING_S):
                    message = await frames.read(reader)
                if message is None:
                    break
                if message["op"] == "heartbeat":
                    if message["step_s"] > STEP_S:
                        break
                    self.gauges = {kind: message[kind] for kind in ("sequences", "pages", "state_bytes")}
                self._receive(message)
                became_ready = became_ready or self._is_ready
        except TimeoutError:
            print("kvsift: the engine process sends no heartbeat and is replaced.", file=sys.stderr)
        finally:
            self._is_ready, self.gauges = False, {}
            self.kill()
            self._writer.close()
            self._writer = None
            for asked in self._asked.values():
                if not asked.done():
                    asked.set_exception(unavailable("restarting", 2))
            await self._process.wait()
        if became_ready and not self._is_stopping:
            print(f"kvsift: the engine process ended ({self._process.returncode}); starting another.", file=sys.stderr)
            self._blame()
        return became_ready

    def _receive(self, message: dict[str, Any]) -> None:
        op = message["op"]
        if op == "fatal":
            raise InputError(message["message"])
        if op == "ready":
            self.names = list(dict.fromkeys(self._settings.names)) or [message["model"]]
            self.positions, self._num_sequences = message["positions"], message["max_seqs"]
            self.plans = PlanList([self._settings.plan, *self._settings.plans, "dense"], message["plans"])
            self.dialect = Dialect(**message["dialect"])
            if self._settings.tool_parser is not None:
                self.dialect = replace(self.dialect, tools=self._settings.tool_parser)
            self._is_ready = True
            self.ready.set()
            self._send_pending()
        elif op == "step":
            for new in message["news"]:
                if (job := self._jobs.get(new["id"])) is not None:
                    self._attempt(job, partial(job.add, new))
        elif op == "document":
            self.documents.received(message)
            if self._tries_alone:
                self._send_pending()
        elif op == "accepted" and (job := self._jobs.get(message["id"])) is not None:
            self._attempt(job, partial(job.accept, message["prompt_tokens"], message["begins_reasoning"]))
        elif op == "converted" and (asked := self._asked.get(message["id"])) is not None and not asked.done():
            asked.set_result(message)
        elif op == "refused":
            retry_after = 5 if message["status"] == 429 else None
            error = ApiError(message["status"], message["message"], message["code"], retry_after=retry_after)
            if (job := self._jobs.get(message["id"])) is not None:
                self._attempt(job, partial(job.fail, error))
            elif (asked := self._asked.get(message["id"])) is not None and not asked.done():
                asked.set_exception(error)

    def _attempt(self, job: ServerJob, work: Callable[[], object]) -> None:
        """Do something for a request, which ends if that fails."""
        try:
            work()
        except Exception as error:
            traceback.print_exc()
            text = f"this answer failed in the server ({type(error).__name__}); its log has the reason."
            job.fail(ApiError(500, text, "answer_failed"))
        self._settle(job)

    def _settle(self, job: ServerJob) -> None:
        if job.is_ended:
            if job.error is not None:  # of one answer; the others end with it
                self._send({"op": "cancel", "id": job.key})
            elif job.first_token:
                self._mean_s += 0.2 * (asyncio.get_running_loop().time() - job.submitted - self._mean_s)
            self._forget(job)
        elif self._tries_alone:  # it may have made progress
            self._send_pending()
