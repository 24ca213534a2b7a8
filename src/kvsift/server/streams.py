"""Responses that end early when their client leaves."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvsift.server.answers import event
from kvsift.server.api_errors import ApiError, ClientLeft
from kvsift.server.jobs import ServerJob

COMMENT_S = 1.0  # without text, until a comment says that the connection lives
STREAM = {  # in the OpenAPI document
    "content": {
        "text/event-stream": {
            "schema": {
                "type": "object",
                "required": ["data"],
                "properties": {"data": {"type": "string"}},
            }  # of each event
        }
    }
}
Result = TypeVar("Result")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of some work, which is cancelled if the client leaves before.

    Raises:
        ClientLeft: then.
    """

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.create_task(work), asyncio.create_task(disconnect())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise ClientLeft
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventResponse(Response):
    """Server-sent events until they end, or the client leaves.

    Args:
        events: those that a client waits for come at once.
        release: called at the end, whatever it is.
        headers: further headers.
    """

    def __init__(
        self, events: AsyncIterator[bytes], release: Callable[[], None] = lambda: None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no", **(headers or {})})
        self._events, self._release = events, release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. If one cannot be made, an error is the last one: the status has been sent before."""
        try:
            with suppress(ClientLeft):
                await while_connected(receive, self._write(send))
        finally:
            self._release()

    async def _write(self, send: Send) -> None:
        names = (b"content-type", b"text/event-stream; charset=utf-8"), *self.raw_headers
        headers = [pair for pair in names if pair[0] != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            end = b""
        except Exception as error:
            traceback.print_exc()
            text = f"this answer failed in the server ({type(error).__name__}); its log has the reason."
            end = event(ApiError(500, text, "answer_failed").as_dict())
        await send({"type": "http.response.body", "body": end, "more_body": False})


class Form(Protocol):
    """The form of an answer."""

    def whole(self, job: ServerJob) -> dict[str, Any]:
        """Return an answer that has ended."""

    def chunks(self, job: ServerJob) -> bytes:
        """Return events for what is new."""

    def last(self, job: ServerJob) -> bytes:
        """Return the last events, or that of an error."""


async def answer_events(job: ServerJob, form: Form) -> AsyncIterator[bytes]:
    """The events of an answer, and comments while there are none."""
    while True:
        is_ended = job.is_ended  # before its pieces are taken
        data = form.chunks(job)
        if is_ended:
            yield data + form.last(job)
            return
        if data:
            yield data
        try:
            async with asyncio.timeout(COMMENT_S):
                await job.wait()
        except TimeoutError:
            yield _comment(job)


def _comment(job: ServerJob) -> bytes:
    """A line that clients skip, with the progress of prefill."""
    if job.num_prefilled is None:
        return b": waiting\n\n"
    return f": read {job.num_prefilled} of {max(job.prompt_tokens or [0])} tokens\n\n".encode()
