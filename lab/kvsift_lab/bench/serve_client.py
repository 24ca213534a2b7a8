"""A client of an OpenAI server: streamed answers with the times of their pieces."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from threading import Event, Thread
from time import perf_counter, sleep
from typing import Any
from urllib.parse import urlsplit

from kvsift.errors import InputError

TIMEOUT_S = 300.0  # between two lines of a stream


@dataclass
class StreamedReply:
    """The answer to one request.

    Attributes:
        started: when it was sent.
        times: of its pieces of text.
        usage: numbers of the server at the end.
        error: why it failed; empty if it did not.
    """

    started: float = 0.0
    times: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Seconds to the first piece."""
        return self.times[0] - self.started

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the server had read before."""
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


class ServerClient:
    """Requests to one server.

    Args:
        url: of the server, without a path.
    """

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url).netloc

    def get(self, path: str) -> Any:
        """Return the JSON of a route.

        Raises:
            InputError: if nothing answers there, or with an error.
        """
        connection = HTTPConnection(self._address, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
            if response.status != 200:
                raise InputError(f"http://{self._address}{path} answers {response.status}: {body[:200]!r}.")
            return json.loads(body)
        except (OSError, HTTPException, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"http://{self._address}{path} does not answer as a server of kvsift: {error}.") from None
        finally:
            connection.close()

    def ask(self, prompt: str, plan: str, max_tokens: int, stop: Event | None = None) -> Asking:
        """Send a request in a thread of its own; ``stop`` ends it with the next piece."""
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "sparsity": plan,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        return Asking(lambda reply: self._stream(json.dumps(body).encode(), reply, stop or Event()))

    def _stream(self, body: bytes, reply: StreamedReply, stop: Event) -> None:
        connection = HTTPConnection(self._address, timeout=TIMEOUT_S)
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                reply.error = response.read(400).decode(errors="replace")
                return
            while not stop.is_set() and (line := response.readline()):
                take_line(line, reply)
        except (OSError, HTTPException) as error:
            reply.error = f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        if not reply.error and not reply.usage and not stop.is_set():
            reply.error = "the stream ended early"


def take_line(line: bytes, reply: StreamedReply) -> None:
    """Add what a line of a stream of events says."""
    if not line.startswith(b"data: {"):
        return  # a comment, the end, or what is between events
    event = json.loads(line.removeprefix(b"data: "))
    if "error" in event:
        reply.error = str(event["error"].get("message", event["error"]))
    elif event.get("usage"):
        reply.usage = event["usage"]
    elif any(choice["text"] for choice in event["choices"]):
        reply.times.append(perf_counter())


class Asking:
    """A request whose answer arrives in another thread.

    Args:
        run: fills the reply.
    """

    def __init__(self, run: Callable[[StreamedReply], None]) -> None:
        self.reply = StreamedReply(perf_counter())
        self._thread = Thread(target=run, args=(self.reply,), daemon=True)
        self._thread.start()

    def wait(self, pieces: int | None = None) -> StreamedReply:
        """Wait for so many pieces, or for the end. Returns the reply.

        Raises:
            InputError: if the request failed.
        """
        if pieces is None:
            self._thread.join()
        while pieces is not None and len(self.reply.times) < pieces and self._thread.is_alive():
            sleep(0.002)
        if self.reply.error:
            raise InputError(f"the server refuses or fails: {self.reply.error}")
        return self.reply
