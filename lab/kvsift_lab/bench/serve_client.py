"""A server of kvsift in a process of its own, and a client that takes the times of the pieces of its answers."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from time import monotonic, perf_counter, sleep
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from kvsift.errors import FailedProcess, InputError, MissingPackage
from kvsift_lab.bench.serve import ServeRecipe

START_S = 600.0  # for a large model to be loaded
STOP_S = 30.0
TIMEOUT_S = 300.0  # between two lines of a stream
OPENER = build_opener(ProxyHandler({}))  # a proxy would be measured too
NO_SERVER = (
    "kvsift bench serve starts kvsift serve, whose packages this Python lacks. Install them: pip install "
    "'kvsift[serve]'."
)


@dataclass
class TimedAnswer:
    """An answer as it arrives.

    Attributes:
        started: when it was asked for.
        times: of its pieces of text.
        tokens: number of its tokens; a piece may be of several.
        usage: numbers of the server at the end.
    """

    started: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft_s(self) -> float:
        """Seconds to the first piece."""
        return self.times[0] - self.started

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the server had read before."""
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    def take(self, line: bytes) -> None:
        """Add what a line of a stream of events says.

        Raises:
            InputError: for an error in the stream.
        """
        if not line.startswith(b"data: {"):
            return  # a comment, the end, or what is between events
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise _failed(event["error"].get("message", event["error"]))
        if event.get("usage"):
            self.usage, self.tokens = event["usage"], event["usage"]["completion_tokens"]
        elif any(choice["text"] for choice in event["choices"]):
            self.times.append(perf_counter())


def get(url: str) -> Any:
    """Return the JSON of an address.

    Raises:
        InputError: if nothing answers there, or with an error.
    """
    try:
        with OPENER.open(url, timeout=TIMEOUT_S) as response:
            return json.loads(response.read())
    except HTTPError as error:
        raise FailedProcess(f"{url} answers {error.code}: {error.read()[:200]!r}.") from None
    except (OSError, HTTPException, ValueError) as error:
        raise FailedProcess(f"{url} does not answer as a server of kvsift: {error}.") from None


def ask(
    url: str, prompt: str, plan: str, max_tokens: int, stop: Event, answer: TimedAnswer | None = None
) -> TimedAnswer:
    """Send a request and follow its answer to the end, or to the next piece once ``stop`` is set.

    Args:
        url: of the server, without a path.
        prompt, plan, max_tokens: of the request.
        stop: ends the answer early.
        answer: filled meanwhile; a new one by default.

    Raises:
        InputError: if the request fails.
    """
    answer = TimedAnswer() if answer is None else answer
    body = {
        "prompt": prompt, "max_tokens": max_tokens, "sparsity": plan, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    request = Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    answer.started = perf_counter()
    try:
        with OPENER.open(request, timeout=TIMEOUT_S) as response:
            for line in response:
                answer.take(line)
                if stop.is_set():
                    return answer
    except HTTPError as error:
        raise _failed(error.read(400).decode(errors="replace")) from None
    except (OSError, HTTPException) as error:
        raise _failed(f"{type(error).__name__}: {error}") from None
    if not answer.usage:
        raise _failed("the stream ended early")
    return answer


def _failed(reason: object) -> InputError:
    return FailedProcess(f"the server refuses or fails: {reason}")


def command_of(recipe: ServeRecipe) -> list[str]:
    """Return the command of the server of a recipe."""
    model = [] if recipe.model is None else [recipe.model]
    threads = [] if recipe.threads is None else ["--threads", str(recipe.threads)]
    allowed = [word for plan in recipe.plans for word in ("--allow-plan", plan)]
    others = ["--plan", "dense", "--port", "0", "--keep-tokens", str(recipe.keep_tokens)]
    return [sys.executable, "-m", "kvsift", "serve", *model, *others, *allowed, *threads]


@contextmanager
def running_server(recipe: ServeRecipe) -> Iterator[str]:
    """Yield the address of a server that is ready; it ends with the block.

    Raises:
        InputError: if it does not start.
    """
    if find_spec("uvicorn") is None or find_spec("fastapi") is None:
        raise MissingPackage(NO_SERVER)
    with tempfile.TemporaryDirectory(prefix="kvsift-bench-") as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as file:
            process = subprocess.Popen(command_of(recipe), stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        try:
            stop = monotonic() + START_S
            while (found := re.search(r" at (http://\S+) ", log.read_text(errors="replace"))) is None:
                if process.poll() is not None or monotonic() > stop:
                    lines = log.read_text(errors="replace").strip().splitlines() or ["it says nothing"]
                    raise FailedProcess(f"the server does not start: {lines[-1]}")
                sleep(0.05)
            yield found[1]
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGINT, signal.SIGINT):  # the second one ends answers in progress
        if process.poll() is None:
            process.send_signal(number)
            sleep(0.2)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
